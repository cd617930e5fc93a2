"""Simulated engines store, load and swap through the real offloading and the real host tier's index."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayk.costs.table import Gap, GapTable, LinearCost
from rayk.simulate import EngineDeath, SimOutcome, cell_arrivals, simulate_cell
from rayk.specs import Cell
from tests.simulate.cells import BOOK, DISPATCH_NS, MODEL, sim_cell

PROMPT = tuple(range(21))
GAP_NS, DIGEST_NS = 300_000, 7_000_000
assert BOOK.any_engine is not None
SLOW = replace(
    BOOK,
    gaps=GapTable(dispatch=Gap(quantiles=(DISPATCH_NS,)), tier=Gap(quantiles=(GAP_NS,))),
    any_engine=replace(BOOK.any_engine, commands={"MakeTicket": LinearCost(fixed_ns=DIGEST_NS)}),
)


def tier_cell(**changes: Any) -> Cell:
    offload = {"host_gib": 0.01, "block_size": 4, "load": "always", "swap": "always"}
    return sim_cell(offload=offload | changes.pop("offload", {}), **changes)


def simulated(
    cell: Cell, due_ns: list[int], *deaths: EngineDeath, prompts: Any = None, book: Any = BOOK
) -> SimOutcome:
    arrivals = cell_arrivals(cell, prompts or [PROMPT] * len(due_ns), due_ns=due_ns)
    return simulate_cell(cell, MODEL, arrivals, book, deaths=deaths)


def test_what_one_engine_computed_another_loads() -> None:
    cell = tier_cell(prefill={"num_engines": 2}, sampling={"max_tokens": 3})
    outcome = simulated(cell, [0, 100_000_000])
    first, second = outcome.requests
    assert (first.prefill_engine, second.prefill_engine) == ("prefill0", "prefill1")
    assert (first.num_host_tokens or 0, second.num_host_tokens) == (0, 20)
    loads = [row for row in outcome.transfers if row.purpose == "load"]
    assert [row.request_id for row in loads] == [second.request_id]
    assert sum(step.num_tokens for step in outcome.steps if step.engine == "prefill1") == 1 + 2


def test_a_load_takes_asking_answering_and_reading() -> None:
    """And what is not digested yet is not there to be loaded."""
    cell = tier_cell(prefill={"num_engines": 2}, sampling={"max_tokens": 3})
    outcome = simulated(cell, [0, 100_000_000], book=SLOW)
    first, second = outcome.requests
    (load,) = (row for row in outcome.transfers if row.purpose == "load")
    assert first.stage_ns["lookup"] == second.stage_ns["lookup"] == 2 * GAP_NS
    assert second.stage_ns["load"] >= load.transfer_ns > 0
    soon = simulated(cell, [0, DIGEST_NS // 2], book=SLOW).requests
    assert [row.num_host_tokens or 0 for row in soon] == [0, 0]


@pytest.mark.parametrize("swap", ["always", "never"])
def test_preempted_requests_are_swapped_out_and_back(swap: str) -> None:
    cell = tier_cell(
        engine={"num_blocks": 18, "max_seqs": 4},
        sampling={"max_tokens": 20},
        offload={"swap": swap, "load": "never", "store": False},
    )
    prompts = [tuple(range(i, i + 11)) for i in range(4)]
    outcome = simulated(cell, [0] * 4, prompts=prompts)
    swaps = [row.num_swaps for row in outcome.requests]
    assert (sum(swaps) > 0) == (swap == "always")
    assert [len(row.output_token_ids) for row in outcome.requests] == [20] * 4
    computed = sum(step.num_tokens for step in outcome.steps)
    assert (computed == 4 * (11 + 19)) == (swap == "always"), "nothing is computed twice, or something is"
    for row in outcome.requests:
        assert sum(row.stage_ns.values()) == row.token_times_ns[-1] - row.arrival_ns
        assert ("swap" in row.stage_ns) == (row.num_swaps > 0)


def test_a_tier_outlives_its_engines() -> None:
    cell = tier_cell(sampling={"max_tokens": 3}, failure_policy="migrate")
    death = EngineDeath(at_s=0.05, engine="prefill0", back_s=0.01)
    rows = simulated(cell, [0, 100_000_000], death).requests
    assert [row.num_host_tokens or 0 for row in rows] == [0, 20]


def test_what_an_engine_had_swapped_out_ends_with_it() -> None:
    cell = tier_cell(
        engine={"num_blocks": 18, "max_seqs": 4}, sampling={"max_tokens": 20}, failure_policy="migrate"
    )
    prompts = [tuple(range(i, i + 11)) for i in range(4)]
    for at_s in (0.004, 0.01, 0.016, 0.02):
        death = EngineDeath(at_s=at_s, engine="prefill0", back_s=0.001)
        rows = simulated(cell, [0] * 4, death, prompts=prompts).requests
        assert [row.error for row in rows] == [None] * 4
        assert [len(row.output_token_ids) for row in rows] == [20] * 4


def test_a_small_tier_forgets_what_was_used_longest_ago() -> None:
    prompts = [tuple(range(i, i + 21)) for i in range(0, 300, 30)]
    due_ns = [i * 100_000_000 for i in range(20)]

    def loaded(host_gib: float) -> list[int]:
        cell = tier_cell(offload={"host_gib": host_gib}, sampling={"max_tokens": 3})
        outcome = simulated(cell, due_ns, prompts=prompts * 2)
        return [row.num_host_tokens or 0 for row in outcome.requests]

    assert loaded(0.01) == [0] * 10 + [20] * 10
    assert loaded(0.00008) == [0] * 20, "each was forgotten before it came again"


def test_a_tier_reads_only_what_it_has_not() -> None:
    """Of the second prompt the first 256 tokens, a row group, are there: digests are of no less."""
    text = tuple(i % 200 for i in range(480))
    cell = tier_cell(engine={"num_blocks": 200}, sampling={"max_tokens": 1}, offload={"load": "never"})

    def stored_bytes(*prompts: tuple[int, ...]) -> int:
        due_ns = [i * 100_000_000 for i in range(len(prompts))]
        found = simulated(cell, due_ns, prompts=prompts).tiers["host"]
        assert found["stores"] == len(prompts)
        return int(str(found["stored_bytes"]))

    row_bytes, rest = divmod(stored_bytes(text[:300]), 300)
    assert rest == 0
    assert stored_bytes(text[:300], text) == (300 + 480 - 256) * row_bytes
    assert stored_bytes(text[:300], text[:300]) == 300 * row_bytes
