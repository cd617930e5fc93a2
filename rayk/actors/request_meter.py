"""What is told of requests where their tokens come together: a cell's coordinator, a server's front."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayk.metrics import BufferedSink
    from rayk.types.rows import RequestRow

BEAT_S = 0.05
"""How often an event loop passes on what was gathered: some requests at a time."""
STAGES = {
    "rayk_request_queue_time_seconds": ("queue",),
    "rayk_request_prefill_time_seconds": ("dispatch", "lookup", "load", "prefill_queue", "prefill"),
    "rayk_request_decode_time_seconds": ("decode_queue", "swap", "decode"),
}
"""Metric -> the stages of a row that it is the sum of."""

OUTCOMES = ("stop", "length", "abort", "error", "refused")
"""How requests end for whoever asked."""


def report_request(sink: BufferedSink, row: RequestRow) -> None:
    """A request is over: how, and its times if it has all its tokens, each gap between these included. One
    without an end: nobody waited for it any more."""
    sink.add("rayk_request_outcomes_total", finish_reason=row.finish_reason or "abort")
    times = row.token_times_ns
    if row.finish_reason not in ("stop", "length") or not times:
        return
    sink.observe("rayk_ttft_seconds", (times[0] - row.arrival_ns) / 1e9)
    sink.observe("rayk_e2e_seconds", (times[-1] - row.arrival_ns) / 1e9)
    if len(times) > 1:
        sink.observe("rayk_tpot_seconds", (times[-1] - times[0]) / (len(times) - 1) / 1e9)
        gaps = ((after - before) / 1e9 for before, after in pairwise(times))
        sink.observe_all("rayk_itl_seconds", gaps)
    for name, stages in STAGES.items():
        if stages[-1] in row.stage_ns:
            sink.observe(name, sum(row.stage_ns.get(stage, 0) for stage in stages) / 1e9)


def begin_outcomes(sink: BufferedSink) -> None:
    """No request has ended yet: what is there from the start has a rate when the first ones do."""
    sink.observe_all("rayk_itl_seconds", ())
    for reason in OUTCOMES:
        sink.add("rayk_request_outcomes_total", 0.0, finish_reason=reason)


async def beat(sink: BufferedSink) -> None:
    """Pass on what was gathered, for ever."""
    while True:
        await asyncio.sleep(BEAT_S)
        sink.pass_observations()
        sink.tick()


@asynccontextmanager
async def beating(sink: BufferedSink) -> AsyncIterator[BufferedSink]:
    """Meanwhile, `beat`; in the end everything is passed on."""
    task = asyncio.create_task(beat(sink))
    try:
        yield sink
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        sink.flush()
