"""What is told of whole engines and of requests' ends, by whoever looks after them."""

from __future__ import annotations

import asyncio

import pytest

from rayk.actors.deployment_metrics import (
    LOST,
    OUTCOMES,
    EngineNow,
    Losses,
    begin_outcomes,
    report_request,
    watch_engines,
    watch_places,
)
from rayk.actors.engines import EngineHandle
from rayk.metrics import Meter
from rayk.sched.admission import News
from rayk.types.config import EngineConfig
from rayk.types.rows import RequestRow
from tests.metrics.recording import Recorder
from tests.sched.test_admission import Admission, place


def row(finish_reason: str | None) -> RequestRow:
    return RequestRow(
        cell_id="c",
        repeat=0,
        request_id="r",
        prompt_index=0,
        prompt_token_ids=[1],
        num_prompt_tokens=1,
        arrival_ns=0,
        finish_reason=finish_reason,
        token_times_ns=[1_000_000, 3_000_000],
    )


@pytest.mark.parametrize(
    ("finish_reason", "counted"),
    [("stop", "stop"), ("length", "length"), ("error", "error"), ("refused", "refused"), (None, "abort")],
)
def test_every_end_of_a_request_is_counted_and_only_whole_ones_have_times(
    finish_reason: str | None, counted: str
) -> None:
    recorder = Recorder(model="m")
    meter = Meter(recorder)
    begin_outcomes(meter)
    meter.flush()
    assert recorder.count("rayk_itl_seconds", model="m") == 0, "it is there before the first gap"
    assert recorder.folded["rayk_itl_seconds"]
    report_request(meter, row(finish_reason))
    meter.flush()
    found = {r: recorder.sum("rayk_request_outcomes_total", finish_reason=r) for r in OUTCOMES}
    assert found == {reason: float(reason == counted) for reason in OUTCOMES}
    assert len(recorder.observed["rayk_e2e_seconds"]) == (counted in ("stop", "length"))
    assert recorder.count("rayk_itl_seconds") == (counted in ("stop", "length"))


def test_engines_are_told_of_as_long_as_somebody_answers_for_them() -> None:
    recorder = Recorder(model="m")
    engines = [EngineNow("e0", "prefill", is_up=False), EngineNow("e1", "decode", is_up=True)]
    meter = Meter(recorder)
    watch_engines(meter, lambda: engines)

    def told() -> dict[str, float]:
        recorder.gauges.clear()
        meter.flush()
        return {
            f"{dict(k)['engine']} {dict(k)['role']}": v for k, v in recorder.gauges["rayk_engine_up"].items()
        }

    assert told() == {"e0 prefill": 0, "e1 decode": 1}
    engines[0] = EngineNow("e0", "decode", is_up=True)  # another role: the old one is no more
    assert told() == {"e0 decode": 1, "e1 decode": 1}
    del engines[1]
    assert told() == {"e0 decode": 1}
    assert {dict(k)["engine"] for k in recorder.counters[LOST]} == {"e0", "e1"}, "from 0"
    assert recorder.sum(LOST) == 0


def test_a_server_tells_how_many_wait_for_a_place_and_how_many_have_one() -> None:
    async def run() -> None:
        recorder = Recorder(model="m")
        meter, admission = Meter(recorder), Admission(max_running=1, max_waiting=4)
        watch_places(meter, admission.dispatcher)
        calls = [place(admission, name) for name in "abc"]
        await asyncio.sleep(0)
        meter.flush()
        assert recorder.gauge("rayk_placed_requests") == 1
        assert recorder.gauge("rayk_waiting_room_requests") == 2
        admission.tell("f", News(ended=("a", "b", "c")))
        await asyncio.gather(*calls, return_exceptions=True)
        meter.flush()
        assert recorder.gauge("rayk_placed_requests") == recorder.gauge("rayk_waiting_room_requests") == 0

    asyncio.run(run())


def test_an_engine_is_lost_once_per_life_and_not_when_its_cell_ends_it() -> None:
    async def run() -> Recorder:
        recorder = Recorder(model="m")
        meter = Meter(recorder)
        losses = Losses(meter)
        config = EngineConfig(model="m", num_blocks=8)
        names = ("prefill0", "prefill0", "prefill1", "prefill2", "prefill3")
        first, again, ends, late, well = (EngineHandle(n, "aggregated", 1, config, []) for n in names)
        for engine in (first, again, ends, late, well):
            losses.watch(engine)
        first.declare_dead("gone")
        again.declare_dead("gone as well")
        await asyncio.sleep(0)
        losses.is_over = True
        ends.declare_dead("killed, for its cell is over")
        await asyncio.sleep(0)
        for name in ("prefill0", "prefill2", "coordinator"):  # what the cell's errors name
            losses.found_late(name)
        meter.flush()
        return recorder

    recorder = asyncio.run(run())
    assert {dict(k)["role"] for k in recorder.counters[LOST]} == {"aggregated"}
    counted = {dict(k)["engine"]: v for k, v in recorder.counters[LOST].items()}
    assert counted == {"prefill0": 2, "prefill2": 1}
