"""A trace with shared prefixes: each request finds as many tokens cached, to the block, as when served."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.engine.loop import EngineLoop
from rayk.models.families import load_config
from rayk.simulate import Arrival, simulate_cell
from rayk.simulate.arrivals import ArrivalSource, TraceArrivals
from rayk.simulate.engine import SimEngine
from rayk.traces import read_trace
from rayk.types.config import EngineConfig
from rayk.types.request import Request
from rayk.types.rows import RequestRow
from tests.markers import thorough
from tests.pd import NAN_POISON, make_request
from tests.simulate.cells import BOOK, sim_cell
from tests.simulate.test_same_decisions import RealEngine

NUM_ROWS = 60
BLOCK_TOKENS = 16
POOL: dict[str, Any] = {
    "num_blocks": 50,
    "max_batch_tokens": 48,
    "max_seqs": 6,
    "prefix_caching": True,
}
"""The pool holds two long prompts: what was shared is evicted before it is asked for again, or not."""


def trace(path: Path) -> Path:
    """Write a trace of conversations on common texts, in Mooncake's format: prompts begin with blocks of
    others, and end within a block or at its end."""
    draw = random.Random(7)
    texts = [[draw.randrange(10**6) for _ in range(draw.randrange(1, 4))] for _ in range(6)]
    rows = []
    for number in range(NUM_ROWS):
        ids = draw.choice(texts)[: draw.randrange(1, 4)] + [10**6 + number] * draw.randrange(2)
        rest = draw.choice([0, 512, draw.randrange(1, 512)])
        rows.append(
            {
                "timestamp": number * 1000,
                "input_length": 512 * (len(ids) - 1) + (rest or 512),
                "output_length": draw.randrange(32, 400),
                "hash_ids": ids,
            }
        )
        if draw.random() < 0.3:
            texts.append(ids)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


def config_of(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), block_size=4, **POOL)


def arrivals_of(path: Path, model: Path, speed: float) -> TraceArrivals:
    tokens = (3, load_config(model).vocab_size - 1)
    return TraceArrivals(read_trace(path), block_tokens=BLOCK_TOKENS, token_ids=tokens, seed=3, speed=speed)


def simulated(model: Path, arrivals: ArrivalSource, *, fast: bool = True, **changes: Any) -> list[RequestRow]:
    config = load_config(model)
    cell = sim_cell(config, engine=POOL | changes)
    return simulate_cell(cell, config, arrivals, BOOK, fast=fast).requests


def asked_of(arrivals: ArrivalSource) -> Iterator[Arrival]:
    while arrivals.next_due_ns() is not None:
        yield arrivals.take()


def told(rows: list[int], found: list[int], num_prompt_tokens: int) -> None:
    """Fail, and name the first request, unless each found as many; say what makes the comparison worth it."""
    assert [(i, a, b) for i, (a, b) in enumerate(zip(rows, found, strict=True)) if a != b] == []
    assert 0.1 < sum(found) / num_prompt_tokens < 0.9


def test_a_traces_cached_share_is_as_served_one_after_another(model: Path, tmp_path: Path) -> None:
    path = trace(tmp_path / "trace.jsonl")
    rows = simulated(model, arrivals_of(path, model, speed=1.0))
    assert len(rows) == NUM_ROWS
    assert all(
        after.arrival_ns > before.token_times_ns[-1] for before, after in zip(rows, rows[1:], strict=False)
    )

    found = []
    with ThreadEngine(config_of(model), poison=NAN_POISON) as engine:
        for arrival in asked_of(arrivals_of(path, model, speed=1.0)):
            request = make_request(f"r{arrival.index}", arrival.prompt, arrival.max_tokens)
            result: RequestResult = engine.collect(engine.submit(request))
            assert result.error is None
            found.append(result.info["num_cached_tokens"])
    whole = simulated(model, arrivals_of(path, model, speed=1.0), num_blocks=2000)
    assert sum(row.num_cached_tokens or 0 for row in whole) > 1.1 * sum(found), "much was evicted"
    told([row.num_cached_tokens or 0 for row in rows], found, sum(row.num_prompt_tokens for row in rows))


@thorough
def test_a_traces_cached_share_is_as_served_where_requests_overlap(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines get each request before the same turn."""
    path = trace(tmp_path / "trace.jsonl")
    order: list[Request | None] = []  # None: a turn
    submit, turn = SimEngine.submit, EngineLoop.turn

    def submitted(self: SimEngine, request: Request, *others: Any, **how: Any) -> None:
        order.append(request)
        submit(self, request, *others, **how)

    def turned(self: EngineLoop) -> bool:
        order.append(None)
        return turn(self)

    with monkeypatch.context() as patched:
        patched.setattr(SimEngine, "submit", submitted)
        patched.setattr(EngineLoop, "turn", turned)
        rows = simulated(model, arrivals_of(path, model, speed=1000.0), fast=False)
    assert any(
        after.arrival_ns < before.token_times_ns[-1] for before, after in zip(rows, rows[1:], strict=False)
    )
    real = RealEngine(config_of(model))
    results: dict[str, RequestResult] = {}
    for request in order:
        if request is None:
            real.loop.turn()
            continue
        result = results[request.request_id] = RequestResult()
        asked = make_request(request.request_id, request.prompt_token_ids, request.sampling.max_tokens)
        real.handover.submit(asked, result.take, hand_over=False)
    found = [results[row.request_id].info["num_cached_tokens"] for row in rows]
    told([row.num_cached_tokens or 0 for row in rows], found, sum(row.num_prompt_tokens for row in rows))
    assert real.leader.scheduler.num_preemptions > 0
