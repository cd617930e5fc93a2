"""Many requests: rows leave as they end, nothing of them stays, and quiet steps at once change none."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

from rayk.sched.request_state import RequestState
from rayk.simulate import Arrival, simulate_cell
from rayk.simulate.clock import MIN_CANCELLED, Event
from rayk.simulate.flow import RequestFlow
from rayk.simulate.late_sink import LateSink
from rayk.simulate.summary import Summary
from rayk.simulate.tokens import SimOutput
from rayk.specs.serving import settings_of
from rayk.types.rows import RequestRow
from tests.markers import one_per
from tests.simulate.cells import BOOK, MODEL, STEP_NS, sim_cell
from tests.simulate.test_servers import CARD

NUM_REQUESTS = 2_000
NUM_ENGINES = 8
LIVING = (RequestRow, RequestFlow, RequestState, LateSink, SimOutput)


class Coming:
    """Requests at random times, and how many were taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    def __iter__(self) -> Iterator[Arrival]:
        draw, at_ns = random.Random(7), 0
        for index in range(NUM_REQUESTS):
            self.num_taken += 1
            at_ns += round(draw.expovariate(NUM_ENGINES / (8 * STEP_NS)))
            yield Arrival(
                at_ns=at_ns,
                index=index,
                prompt=tuple(range(draw.randrange(5, 20))),
                max_tokens=40,
                num_output_tokens=draw.randrange(10, 40),
            )


class Ends(Summary):
    """What became of each request, and how much there was at a time."""

    def __init__(self, coming: Coming) -> None:
        super().__init__()
        self.told: list[tuple[Any, ...]] = []
        self.most_under_way = self.most_events = 0
        self.living: list[dict[type, int]] = []
        self._coming = coming

    def __call__(self, row: RequestRow) -> None:
        super().__call__(row)
        self.told.append(
            (row.prompt_index, row.prefill_engine, hash(tuple(row.token_times_ns)), row.stage_ns)
        )
        self.most_under_way = max(self.most_under_way, self._coming.num_taken - self.num_requests)
        if self.num_requests % 500 == 0:
            gc.collect()
            there = [type(o) for o in gc.get_objects()]
            self.living.append({kind: there.count(kind) for kind in LIVING})
            self.most_events = max(self.most_events, there.count(Event))


@pytest.mark.parametrize("pairs", [False, True])
@one_per()
def test_memory_is_for_what_is_under_way(pairs: bool) -> None:
    changes: dict[str, Any] = {"mode": "disaggregated", "decode": {"block_size": 4}} if pairs else {}
    cell = sim_cell(engine={"max_seqs": 16, "num_blocks": 400}, **changes)
    num = NUM_ENGINES // 2 if pairs else NUM_ENGINES
    decode = [] if cell.decode is None else [cell.decode] * num
    server = settings_of(cell, CARD, [cell.prefill] * num, decode, max_running=1_000)
    ends = {}
    for is_fast in (True, False):
        coming = Coming()
        ends[is_fast] = Ends(coming)
        outcome = simulate_cell(
            cell, MODEL, iter(coming), BOOK, server=server, fast=is_fast, sink=ends[is_fast]
        )
        assert [outcome.requests, outcome.transfers, outcome.steps] == [[], [], []]
    fast, slow = ends[True], ends[False]
    assert fast.told == slow.told
    assert fast.num_requests == NUM_REQUESTS
    assert not fast.num_failed
    assert fast.most_under_way < 200
    for living in fast.living:
        assert 0 < max(living.values()) <= 2 * fast.most_under_way, living
    assert fast.most_events < 2 * MIN_CANCELLED + 10 * fast.most_under_way
    assert fast.percentile("tpot_ms", 50) > STEP_NS / 1e6
    assert fast.percentile("ttft_ms", 50) < fast.percentile("e2e_ms", 50)
