"""Stages of a request: from what engines say of when they did what, end to end. No Ray."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayk.actors.deployment_metrics import report_request
from rayk.actors.engines import EngineHandle
from rayk.actors.push_flow import reserved
from rayk.actors.request_run import RequestRun, Route, RunRules
from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.arrival_times import arrival_stages
from rayk.handover.engine_request import EngineRequest
from rayk.metrics import Meter
from rayk.reports import ResultWriter, load
from rayk.reports.fields import STAGES
from rayk.reports.stages import limit_rows
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.types.config import EngineConfig
from rayk.types.errors import TransferError
from rayk.types.request import FinishReason, Request, SamplingParams
from rayk.types.rows import CellRow, RequestRow, TransferRow, moving_ns
from rayk.types.stage_clock import StageClock
from tests.actors.test_request_rows import Unheard
from tests.metrics.recording import Recorder
from tests.reports.synthetic import SPEC

REQUEST = Request(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams())
RULES = RunRules(is_push=False, request_s=1.0, transfer_s=1.0, recomputes=False)
TICKET = TransferTicket(
    request_id="r",
    lease_id="l",
    engine="prefill0",
    epoch=1,
    num_tokens=3,
    block_tables=(),
    generations=(),
    digests=np.zeros((2, 0), np.int64),
    digest_ns=(2, 3),
)
AHEAD_NS = 5_000
"""The decode engine's clock is behind the coordinator's by so much."""


class Played(EngineHandle):
    """An engine that says what it was told to."""

    def __init__(self, name: str, role: str, events: list[RequestEvent], offset_ns: int = 0) -> None:
        alive: Any = None  # nobody waits for its end
        super().__init__(name, role, 1, EngineConfig(model="m"), [], clock_offset_ns=offset_ns, died=alive)
        self.events = events

    @property
    def leader(self) -> Any:
        """Takes any call."""
        return Anything()

    async def stream(self, timeout_s: float, asked: EngineRequest) -> AsyncIterator[list[RequestEvent]]:
        """Each event alone."""
        del timeout_s, asked
        for event in self.events:
            yield [event]


class Anything:
    """Has every method, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def event(time_ns: int, **fields: Any) -> RequestEvent:
    return RequestEvent(request_id="r", time_ns=time_ns, **fields)


def telling(event: RequestEvent, **more: Any) -> RequestEvent:
    """The event, with more to tell."""
    return replace(event, info=replace(event.info or EventInfo(), **more))


def row_of(arrival_ns: int = 0) -> RequestRow:
    return RequestRow(
        cell_id="c",
        repeat=0,
        request_id="r",
        prompt_index=0,
        prompt_token_ids=[1, 2, 3],
        arrival_ns=arrival_ns,
    )


def run_attempts(
    row: RequestRow, monkeypatch: pytest.MonkeyPatch, *attempts: list[Played], sent_ns: tuple[int, ...]
) -> None:
    """Attempts, one behind the other, each of one or two engines, whose first messages leave at `sent_ns`."""
    clock = SimpleNamespace(monotonic_ns=iter(sent_ns).__next__)
    monkeypatch.setattr("rayk.types.clock.time", clock)

    async def run() -> None:
        request_run = RequestRun(RULES, row, Unheard())
        for number, engines in enumerate(attempts):

            async def find(engine: EngineHandle) -> EngineHandle:
                return engine

            first, last = engines[0], engines[-1]
            route = Route(
                request=REQUEST,
                prefill=lambda e=first: find(e),  # type: ignore[misc]
                decode=(lambda e=last: find(e)) if len(engines) > 1 else None,  # type: ignore[misc]
                number=number,
            )
            try:
                await request_run.attempt(route)
            except TransferError:
                assert number + 1 < len(attempts)

    asyncio.run(run())


def prefill_events(start_ns: int) -> list[RequestEvent]:
    """Came 10 after `start_ns`, first step 30 later, a token 100 after that, the ticket 7 later."""
    info = EventInfo(submitted_ns=start_ns + 10, first_step_ns=start_ns + 40)
    return [
        event(start_ns + 140, token_ids=(4,), info=info),
        event(start_ns + 147, payload=TICKET),
    ]


HERE: Mapping[str, int] = {"reserve": 11, "read": 22, "fence": 3, "verify": 5}


def decode_events(taken_ns: int, here: Mapping[str, int] = HERE, **info: Any) -> list[RequestEvent]:
    """Read in 41, noticed 6 later, in a step 9 later, tokens 20 and 30 after its begin."""
    at = taken_ns + 41
    told = EventInfo(submitted_ns=taken_ns - 8, taken_ns=taken_ns, stage_ns=here, **info)
    return [
        event(at + 6, info=told),
        event(at + 35, token_ids=(5,), info=EventInfo(first_step_ns=at + 15)),
        event(at + 45, token_ids=(6,), finish_reason=FinishReason.LENGTH),
    ]


def test_a_pulled_request_has_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(arrival_ns=1_000)
    d = Played("decode0", "decode", decode_events(1_200 - AHEAD_NS), AHEAD_NS)
    run_attempts(
        row, monkeypatch, [Played("prefill0", "prefill", prefill_events(1_002)), d], sent_ns=(1_002,)
    )
    assert row.stage_ns == {
        "queue": 2,
        "dispatch": 10,
        "prefill_queue": 30,
        "prefill": 100,
        "ticket": 4,
        "digest": 3,
        "handover": 1_192 - 1_149,
        **HERE,
        "notice": 8 + 6,
        "decode_queue": 9,
        "decode": 30,
    }
    assert sum(row.stage_ns.values()) == row.token_times_ns[-1] - row.arrival_ns
    assert row.exposed_ns == 1_247 - 1_142
    assert set(row.stage_ns) | {"retry", "lookup", "load", "relay", "swap"} == set(STAGES)


LIMIT_OF = {
    "queue": "queue",
    "dispatch": "coordinator",
    "prefill_queue": "prefill",
    "prefill": "prefill",
    "ticket": "ticket",
    "digest": "checks",
    "handover": "coordinator",
    "reserve": "decode KV",
    "read": "link",
    "fence": "checks",
    "verify": "checks",
    "notice": "decode step",
    "decode_queue": "decode step",
    "decode": "decode step",
}
"""What limits a cell whose requests spend most of their time in a stage."""


def paced(took_ns: Mapping[str, int]) -> tuple[list[RequestEvent], list[RequestEvent]]:
    """What both engines say of a pulled request whose stages take as long as told."""
    at = dict(zip(took_ns, accumulate(took_ns.values()), strict=True))
    ticket = replace(TICKET, digest_ns=(1, took_ns["digest"]))
    here = {stage: took_ns[stage] for stage in HERE}
    first = EventInfo(submitted_ns=at["dispatch"], first_step_ns=at["prefill_queue"])
    came = EventInfo(submitted_ns=at["handover"], taken_ns=at["handover"], stage_ns=here)
    prefill = [event(at["prefill"], token_ids=(4,), info=first), event(at["digest"], payload=ticket)]
    end = telling(
        event(at["decode"], token_ids=(5,), finish_reason=FinishReason.LENGTH),
        first_step_ns=at["decode_queue"],
    )
    return prefill, [event(at["notice"], info=came), end]


def test_the_stage_that_takes_longest_limits_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what engines say to the report: ms on a clock, one stage of each cell as long as 20 others."""
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for long in LIMIT_OF:
        took_ns = {stage: (20 if stage == long else 1) * 10**6 for stage in LIMIT_OF}
        row, (prefill, decode) = replace(row_of(), cell_id=long), paced(took_ns)
        engines = [Played("prefill0", "prefill", prefill), Played("decode0", "decode", decode)]
        run_attempts(row, monkeypatch, engines, sent_ns=(took_ns["queue"],))
        assert row.stage_ns == took_ns
        writer.write_cell(CellRow(cell_id=long, axes={}, verdict="PASS"), [row], [])
    writer.finish()
    rows = {row["cell_id"]: row for row in limit_rows(load(tmp_path))}
    assert {stage: row["limit"] for stage, row in rows.items()} == LIMIT_OF
    assert rows["handover"]["coordinator"] == pytest.approx(100 * 21 / 33)


def test_an_aggregated_request_has_its_engines_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of()
    events = prefill_events(5)[:1]
    events.append(event(300, token_ids=(5,), finish_reason=FinishReason.LENGTH))
    run_attempts(row, monkeypatch, [Played("prefill0", "aggregated", events)], sent_ns=(5,))
    assert row.stage_ns == {"queue": 5, "dispatch": 10, "prefill_queue": 30, "prefill": 100, "decode": 155}


ASKED = {"asked_ns": 18, "found_ns": 25}
"""Of the host tier, 3 after the request came; it answered 7 later."""


@pytest.mark.parametrize("loaded_ns", [None, 31])
def test_what_a_prompt_waits_for_the_host_tier_is_told(
    loaded_ns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = row_of()
    events = prefill_events(5)[:1]
    events[0] = telling(events[0], loaded_ns=loaded_ns, **ASKED)
    if loaded_ns is not None:
        # What was loaded is told before the first token, and is no hand-over.
        events.insert(0, event(31, info=EventInfo(load_ns=13, num_host_tokens=2, num_disk_tokens=1)))
    events.append(event(300, token_ids=(5,), finish_reason=FinishReason.LENGTH))
    run_attempts(row, monkeypatch, [Played("prefill0", "aggregated", events)], sent_ns=(5,))
    expected = {
        "queue": 5,
        "dispatch": 10,
        "lookup": 7,
        "prefill_queue": 3 + 20,
        "prefill": 100,
        "decode": 155,
    }
    if loaded_ns is not None:
        expected |= {"load": 6, "prefill_queue": 3 + 14}
    assert row.stage_ns == expected
    assert sum(row.stage_ns.values()) == row.token_times_ns[-1]
    assert (row.num_host_tokens, row.load_ns) == ((0, 0) if loaded_ns is None else (2, 13))


@pytest.mark.parametrize("in_prefill", [True, False])
def test_a_swapped_request_is_away_neither_computing_nor_decoding(
    in_prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = row_of()
    first = prefill_events(5)[0]
    last = event(300, token_ids=(5,), finish_reason=FinishReason.LENGTH, info=EventInfo(num_swaps=1))
    if in_prefill:  # from 60 to 100; what the first token tells is told then
        away = event(100, info=telling(first, swap_ns=40).info)
        events = [away, event(145, token_ids=(4,)), last]
    else:  # from 170 to 210
        events = [first, event(210, info=EventInfo(swap_ns=40)), last]
    run_attempts(row, monkeypatch, [Played("prefill0", "aggregated", events)], sent_ns=(5,))
    prefill, decode = (60, 155) if in_prefill else (100, 115)
    assert row.stage_ns == {
        "queue": 5,
        "dispatch": 10,
        "prefill_queue": 30,
        "prefill": prefill,
        "swap": 40,
        "decode": decode,
    }
    assert sum(row.stage_ns.values()) == row.token_times_ns[-1]
    assert (row.num_swaps, row.swap_ns) == (1, 40)


def test_what_a_failed_attempt_took_is_told_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of()
    lost = [
        event(
            900,
            error=TransferError("r", "lost"),
            info=EventInfo(submitted_ns=200, taken_ns=200, stage_ns={"reserve": 5}),
        )
    ]
    attempts = [
        [Played("prefill0", "prefill", prefill_events(5)), Played("decode0", "decode", lost)],
        [
            Played("prefill1", "prefill", prefill_events(1_000)),
            Played("decode0", "decode", decode_events(1_200)),
        ],
    ]
    run_attempts(row, monkeypatch, *attempts, sent_ns=(5, 1_000))
    assert row.output_token_ids == [4, 5, 6]
    assert (row.stage_ns["queue"], row.stage_ns["retry"]) == (5, 1_000 - 152)
    # Of both attempts.
    assert (row.stage_ns["prefill_queue"], row.stage_ns["prefill"], row.stage_ns["digest"]) == (60, 200, 6)
    assert row.stage_ns["reserve"] == 11
    assert sum(row.stage_ns.values()) == row.token_times_ns[-1]


def test_a_decode_engine_that_goes_on_by_itself_computes_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of()
    here = {stage: HERE[stage] for stage in ("reserve", "read")}
    events = decode_events(200, here, failure=TransferError("r", "lost"), num_valid_tokens=1)
    run_attempts(
        row,
        monkeypatch,
        [Played("prefill0", "prefill", prefill_events(5)), Played("decode0", "decode", events)],
        sent_ns=(5,),
    )
    # Reserved and read after 33; noticed 14 later; in a step 9 later; a token 20 after that.
    assert (row.stage_ns["retry"], row.stage_ns["prefill_queue"], row.stage_ns["prefill"]) == (14, 39, 120)
    assert row.stage_ns["notice"] == 8
    assert "decode_queue" not in row.stage_ns
    assert row.stage_ns["decode"] == 10
    assert sum(row.stage_ns.values()) == row.token_times_ns[-1]


def test_a_push_goes_by_the_decode_engine_first() -> None:
    row = row_of()
    stages = StageClock(row)
    given = event(
        160 - AHEAD_NS,
        payload=Reservation.__new__(Reservation),
        info=EventInfo(submitted_ns=60 - AHEAD_NS, taken_ns=72 - AHEAD_NS),
    )
    d, p = Played("decode0", "decode", [given], AHEAD_NS), Played("prefill0", "prefill", [])

    async def run() -> None:
        stages.end("queue", 50)
        async with reserved(1.0, p, d, REQUEST, stages):
            stages.end("dispatch", 190)

    asyncio.run(run())
    assert row.stage_ns == {"queue": 50, "dispatch": 10 + 30, "notice": 12, "reserve": 88}


def test_clocks_that_disagree_make_no_time_and_lose_none() -> None:
    row = row_of()
    clock = StageClock(row)
    clock.end("dispatch", 100)
    clock.end("prefill_queue", 90)
    clock.end("prefill", 150)
    assert row.stage_ns == {"dispatch": 100, "prefill_queue": 0, "prefill": 50}


def outcome(began_ns: int | None, rows: tuple[TransferRow, ...] = (), **stage_ns: int) -> TransferOutcome:
    return TransferOutcome(
        request_id="r",
        lease_id="l",
        error=None,
        rows=rows,
        stage_ns=stage_ns,
        is_draining=False,
        began_ns=began_ns,
    )


def transfer(begin_ns: int, end_ns: int) -> TransferRow:
    row = TransferRow(
        cell_id="",
        repeat=0,
        request_id="r",
        producer_rank=0,
        consumer_rank=0,
        group=0,
        bytes=1,
        num_descriptors=1,
    )
    row.span(begin_ns, end_ns)
    return row


def test_a_stage_ends_with_its_last_rank() -> None:
    # The slowest reader is not the slowest to verify: the longest of each would be 30 + 5 + 40.
    ranks = [outcome(110, read=30, fence=1, verify=5), outcome(112, read=10, fence=5, verify=40)]
    assert arrival_stages(ranks, 100, 105, 200) == {"reserve": 10, "read": 30, "fence": 1, "verify": 26}
    # A rank that reads nothing has no fence.
    ranks.append(outcome(111, read=2, verify=1))
    assert arrival_stages(ranks, 100, 105, 200) == {"reserve": 10, "read": 30, "fence": 1, "verify": 26}
    assert arrival_stages([outcome(None)], 100, 105, 200) == {"reserve": 5}


def test_a_rank_on_another_host_begins_with_rank_0() -> None:
    rows = (transfer(7_000_003, 7_000_009),)
    ranks = [outcome(110, read=30), outcome(7_000_000, rows, read=50)]
    assert arrival_stages(ranks, 100, 105, 200) == {"reserve": 5, "read": 50}
    assert (rows[0].begin_ns, rows[0].end_ns, rows[0].transfer_ns) == (108, 114, 6)


def test_reads_that_follow_one_another_take_from_the_first_post_to_the_last_byte() -> None:
    draw = random.Random(3)
    for _ in range(50):
        spans = [sorted(draw.sample(range(1_000), 2)) for _ in range(draw.randrange(1, 6))]
        row = transfer(*spans[0])
        for begin, end in spans[1:]:
            row.span(begin, end)
        whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
        assert row.transfer_ns == whole == moving_ns([transfer(*span) for span in spans])
    pushed = [transfer(0, took) for took in (3, 9)]
    for row in pushed:
        row.begin_ns = row.end_ns = None
    assert moving_ns(pushed) == 9
    assert moving_ns([]) == 0


def test_the_metrics_are_sums_of_stages() -> None:
    row = row_of()
    row.token_times_ns, row.finish_reason = [10, 20], "length"
    row.stage_ns = {stage: 10**index for index, stage in enumerate(STAGES)}
    told = Recorder(model="m")
    meter = Meter(told)
    report_request(meter, row)
    meter.flush()
    at = list(STAGES).index
    for name, stages in (
        ("queue", ("queue",)),
        ("prefill", ("dispatch", "lookup", "load", "prefill_queue", "prefill")),
        ("decode", ("decode_queue", "swap", "decode")),
    ):
        [seconds] = told.observed[f"rayk_request_{name}_time_seconds"]
        assert seconds == pytest.approx(sum(10 ** at(stage) for stage in stages) / 1e9)
