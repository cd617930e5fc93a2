"""Policies place simulated requests by what real dispatchers know: prefixes, sessions, lengths."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rayk.simulate import Arrival, SimOutcome, simulate_cell
from rayk.simulate.arrivals import TraceArrivals
from rayk.traces import Recorded
from tests.simulate.cells import BOOK, MODEL, pair_book, pair_cell, sim_cell

NUM_ENGINES = 8
ENGINE = {"prefix_caching": True, "num_blocks": 60, "max_batch_tokens": 64}


def simulated(rows: list[Recorded], policy: str) -> SimOutcome:
    """Simulate a trace of which 512 tokens are 16."""
    settings = {"policy_settings": {"block_tokens": 16}} if policy == "prefix_aware" else {}
    cell = sim_cell(policy=policy, prefill={"num_engines": NUM_ENGINES}, engine=ENGINE, **settings)
    arrivals = TraceArrivals(rows, block_tokens=16, token_ids=(3, 200), seed=1, speed=1.0)
    return simulate_cell(cell, MODEL, arrivals, BOOK)


def cached_share(outcome: SimOutcome) -> float:
    num_cached = sum(row.num_cached_tokens or 0 for row in outcome.requests)
    return num_cached / sum(row.num_prompt_tokens for row in outcome.requests)


def row(number: int, **changes: Any) -> Recorded:
    wanted = {"at_ns": number * 5_000_000, "num_prompt_tokens": 1500, "num_output_tokens": 32, **changes}
    return Recorded(**wanted)


def test_requests_of_one_text_go_where_it_is_cached() -> None:
    """Eight texts on eight engines, whose pools hold a few of them each: of three blocks two are common."""
    draw = random.Random(2)
    rows = [row(i, hash_ids=(text := draw.randrange(8), 100 + text, 1000 + i)) for i in range(120)]
    shares = {name: cached_share(simulated(rows, name)) for name in ("round_robin", "prefix_aware")}
    whole = (120 - 8) / 120 * 2 / 3
    assert shares["prefix_aware"] > 0.9 * whole
    assert shares["round_robin"] < 0.75 * whole


def test_a_session_stays_on_its_engine() -> None:
    rows = [
        row(
            i,
            session=f"s{i % 20}",
            num_prompt_tokens=512 * (1 + i // 20),
            at_ns=i * 5_000_000 if i < 20 else None,
        )
        for i in range(80)
    ]
    outcome = simulated(rows, "session_affinity")
    homes: dict[int, set[str | None]] = {}
    for request in outcome.requests:
        homes.setdefault(request.prompt_index % 20, set()).add(request.prefill_engine)
    assert all(len(engines) == 1 for engines in homes.values())
    assert len(set.union(*homes.values())) > NUM_ENGINES // 2
    later = [request for request in outcome.requests if request.prompt_index >= 20]
    assert all((request.num_cached_tokens or 0) >= 16 for request in later), "the turn before"


@pytest.mark.parametrize("num_tokens", [8, 64])
def test_short_prompts_are_computed_where_they_are_decoded(num_tokens: int) -> None:
    cell = pair_cell(policy="conditional", policy_settings={"local_prompt_tokens": 32}, engine=ENGINE)
    arrivals = [Arrival(at_ns=0, index=0, prompt=tuple(range(num_tokens)), max_tokens=3)]
    (request,) = simulate_cell(cell, MODEL, arrivals, pair_book(cell)).requests
    assert request.decode_engine == "decode0"
    assert (request.prefill_engine, request.kv_path) == (
        (None, "local") if num_tokens == 8 else ("prefill0", "remote")
    )
