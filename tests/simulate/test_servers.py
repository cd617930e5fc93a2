"""Simulated servers let requests wait, turn them away and time them out as real ones do."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rayk.sched.admission import AdmissionController, News
from rayk.sched.dispatcher import Dispatcher
from rayk.sched.policies import get_policy
from rayk.sched.request_describer import RequestDescriber
from rayk.simulate import Arrival, SimOutcome, simulate_cell
from rayk.specs.serving import ServerSettings, settings_of
from rayk.types.errors import DeadlineExceeded, Overloaded
from rayk.types.rows import RequestRow
from rayk.types.serving import ModelCard
from tests.simulate.cells import BOOK, DISPATCH_NS, MODEL, STEP_NS, TOKEN_NS, sim_cell

CARD = ModelCard(model_id="m", folder="m", vocab_size=MODEL.vocab_size, max_positions=MODEL.max_positions)
PROMPT = (1, 2, 3)
FIRST_NS = STEP_NS + 3 * TOKEN_NS
"""What a step of PROMPT takes."""


def server_of(num_engines: int = 1, **others: Any) -> ServerSettings:
    return settings_of(sim_cell(), CARD, [sim_cell().prefill] * num_engines, [], **others)


def served(server: ServerSettings, arrivals: Sequence[Arrival]) -> SimOutcome:
    return simulate_cell(sim_cell(), MODEL, arrivals, BOOK, server=server)


def ask(index: int, at_ns: int = 0, **changes: Any) -> Arrival:
    return replace(Arrival(at_ns=at_ns, index=index, prompt=PROMPT, max_tokens=2), **changes)


def test_requests_wait_for_a_place_by_priority_and_are_turned_away_where_too_many_do() -> None:
    server = server_of(max_running=1, max_waiting=2)
    arrivals = [ask(0), ask(1), ask(2, priority=-1), ask(3)]
    rows = served(server, arrivals).requests
    took_ns = DISPATCH_NS + FIRST_NS + STEP_NS + TOKEN_NS
    assert [row.stage_ns.get("queue") for row in rows] == [0, 2 * took_ns, took_ns, None]
    assert [row.finish_reason for row in rows] == ["length", "length", "length", "refused"]
    assert rows[3].error == str(Overloaded("2 requests wait already", 1.0))
    assert rows[3].output_token_ids == []


def test_requests_end_when_their_time_is_over_wherever_they_are() -> None:
    """One while it runs, one while it waits; the place of the first is the third one's."""
    server = server_of(max_running=1, request_s=60.0)
    took_ns = DISPATCH_NS + FIRST_NS
    late_s = (took_ns + 1000) / 1e9
    arrivals = [ask(0, deadline_s=late_s, max_tokens=50), ask(1, deadline_s=late_s / 2), ask(2)]
    rows = served(server, arrivals).requests
    assert [row.error for row in rows] == [
        str(DeadlineExceeded(f"request {rows[0].request_id}", late_s)),
        str(DeadlineExceeded(f"request {rows[1].request_id}", late_s / 2)),
        None,
    ]
    assert [len(row.output_token_ids) for row in rows] == [1, 0, 2]
    assert rows[2].stage_ns["queue"] == took_ns + 1000


def test_a_server_gives_as_many_places_as_its_settings_say() -> None:
    """Twice the rows of an engine, on two engines; none streams beside them."""
    cell = sim_cell(engine={"max_seqs": 2})
    server = settings_of(cell, CARD, [cell.prefill] * 2, [])
    rows = served(server, [ask(i) for i in range(10)]).requests
    assert [row.stage_ns["queue"] > 0 for row in rows] == [False] * 8 + [True] * 2


class VirtualSelector(selectors.DefaultSelector):
    """Moves a clock on where an event loop would wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        self.now_s += timeout
        return super().select(0)


def admitted(server: ServerSettings, arrivals: Sequence[Arrival], rows: Sequence[RequestRow]) -> list[Any]:
    """What the real admission makes of requests that last as long as the simulated ones did: when each got
    its place and on which engine, or the error that it got instead."""
    selector = VirtualSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    places = server.max_places((e.role, e.config) for e in server.engines)
    policy = get_policy(server.policy, server.policy_settings)
    dispatcher = Dispatcher(policy, server.dispatch_rules, max_running=places)
    admission = AdmissionController(dispatcher, id, clock=lambda: round(selector.now_s * 1e9))
    describer = RequestDescriber(server.policy, server.policy_settings, bytes(32))

    async def one(arrival: Arrival, row: RequestRow) -> Any:
        await asyncio.sleep(arrival.at_ns / 1e9)
        name = row.request_id
        asked = describer.describe(name, arrival.prompt, max_tokens=arrival.max_tokens)
        deadline_s = arrival.deadline_s or server.request_s
        try:
            place = await admission.place(
                "front", asked, priority=arrival.priority, deadline_s=deadline_s, again=False
            )
        except (Overloaded, DeadlineExceeded) as error:
            return type(error)
        placed_ns = round(selector.now_s * 1e9)
        end_ns = row.token_times_ns[-1] if row.error is None else arrival.at_ns + int(deadline_s * 1e9)
        await asyncio.sleep(end_ns / 1e9 - selector.now_s)
        admission.tell("front", News(ended=(name,)))
        return placed_ns, place.prefill

    async def every() -> list[Any]:
        for entry in server.engines:
            admission.open(entry.name, entry.role, entry.config.num_ranks)
        return await asyncio.gather(*map(one, arrivals, rows))

    try:
        return loop.run_until_complete(every())
    finally:
        loop.close()


@pytest.mark.parametrize("seed", range(6))
def test_whoever_waits_is_let_in_when_and_where_the_real_admission_does(seed: int) -> None:
    draw = random.Random(seed)
    arrivals, at_ns = [], 0
    for index in range(60):
        at_ns += draw.randrange(2_000_001)
        arrivals.append(
            ask(
                index,
                at_ns,
                max_tokens=draw.randrange(1, 9),
                priority=draw.randrange(3),
                deadline_s=draw.choice([None, 0.004, 0.02]),
            )
        )
    server = server_of(2, max_running=3, max_waiting=4)
    rows = served(server, arrivals).requests
    kinds = set()
    for row, real in zip(rows, admitted(server, arrivals, rows), strict=True):
        kinds.add("placed" if isinstance(real, tuple) else real.__name__)
        if real is Overloaded:
            assert row.error is not None
            assert row.error.startswith("4 requests wait already")
        elif real is DeadlineExceeded:
            assert row.prefill_engine is None
            assert row.error is not None
            assert "0.0" in row.error
        else:
            placed_ns = row.arrival_ns + row.stage_ns["queue"]
            assert abs(placed_ns - real[0]) <= 1000, "rounded seconds"
            assert row.prefill_engine == real[1]
    assert kinds >= {"placed", "Overloaded", "DeadlineExceeded"}
