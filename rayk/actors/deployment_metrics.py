"""What is reported of requests where their tokens come together (a cell's coordinator, a server's front), and
of whole engines by whoever looks after them, also where an engine itself cannot report any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rayk.actors.engines import EngineHandle
    from rayk.metrics import Meter
    from rayk.sched.dispatcher import Dispatcher
    from rayk.types.rows import RequestRow

LOST = "rayk_engines_lost_total"
"""Engines that died or hung."""
BEAT_S = 0.05
"""How often an event loop passes on what was gathered, which is of a few requests then."""
STAGES = {
    "rayk_request_queue_time_seconds": ("queue",),
    "rayk_request_prefill_time_seconds": ("dispatch", "lookup", "load", "prefill_queue", "prefill"),
    "rayk_request_decode_time_seconds": ("decode_queue", "swap", "decode"),
}
"""Metric -> the stages of a row that it is the sum of."""

OUTCOMES = ("stop", "length", "abort", "error", "refused")
"""How requests end for whoever asked."""


def report_request(meter: Meter, row: RequestRow) -> None:
    """Report how a request ended and, if it has all its tokens, its times and each gap between them. A row
    without an end is of a request that nobody waited for any more."""
    meter.add("rayk_request_outcomes_total", finish_reason=row.finish_reason or "abort")
    if row.finish_reason not in ("stop", "length") or row.ttft_ns is None or row.e2e_ns is None:
        return
    meter.observe("rayk_ttft_seconds", row.ttft_ns / 1e9)
    meter.observe("rayk_e2e_seconds", row.e2e_ns / 1e9)
    if row.tpot_ns is not None:
        meter.observe("rayk_tpot_seconds", row.tpot_ns / 1e9)
        gaps = ((after - before) / 1e9 for before, after in pairwise(row.token_times_ns))
        meter.observe_all("rayk_itl_seconds", gaps)
    for name, stages in STAGES.items():
        if stages[-1] in row.stage_ns:
            meter.observe(name, sum(row.stage_ns.get(stage, 0) for stage in stages) / 1e9)


def begin_outcomes(meter: Meter) -> None:
    """Make the counters of requests exist at 0, so that the first ones have a rate."""
    meter.observe_all("rayk_itl_seconds", ())
    for reason in OUTCOMES:
        meter.add("rayk_request_outcomes_total", 0.0, finish_reason=reason)


async def beat(meter: Meter) -> None:
    """Pass on what a meter has gathered, every BEAT_S, for ever."""
    while True:
        await asyncio.sleep(BEAT_S)
        meter.pass_observations()
        meter.tick()


@asynccontextmanager
async def beating(meter: Meter) -> AsyncIterator[Meter]:
    """Run `beat` on a meter within the block; everything is passed on at the end."""
    task = asyncio.create_task(beat(meter))
    try:
        yield meter
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        meter.flush()


class EngineNow(NamedTuple):
    """One engine as it is meant to be now."""

    name: str
    role: str
    is_up: bool
    """Whether its loop is meant to run; else it is being formed."""


def watch_engines(meter: Meter, engines: Callable[[], Iterable[EngineNow]]) -> None:
    """Report at each flush the engines that `engines` returns then; Ray forgets the others."""
    told: set[tuple[str, str]] = set()

    def report() -> None:
        now = {(e.name, e.role): e.is_up for e in engines()}
        for engine, role in told - now.keys():
            meter.forget("rayk_engine_up", engine=engine, role=role)
        told.clear()
        told.update(now)
        for (engine, role), is_up in now.items():
            meter.set("rayk_engine_up", float(is_up), engine=engine, role=role)
            meter.add(LOST, 0.0, engine=engine, role=role)

    meter.on_flush(report)


def watch_places(meter: Meter, dispatcher: Dispatcher) -> None:
    """Report at each flush how many requests have a place, and how many wait for one."""

    def report() -> None:
        meter.set("rayk_waiting_room_requests", dispatcher.num_waiting)
        meter.set("rayk_placed_requests", dispatcher.num_running)

    meter.on_flush(report)


class Losses:
    """Counts the engines that a cell lost, each life once."""

    def __init__(self, meter: Meter) -> None:
        self.is_over = False
        """Whether the cell ends its engines now: one that dies of that was not lost."""
        self._meter = meter
        self._roles: dict[str, str] = {}
        self._counted: set[str] = set()

    def watch(self, engine: EngineHandle) -> None:
        """Count an engine when it dies."""
        self._roles[engine.name] = engine.role
        engine.died.add_done_callback(lambda _: None if self.is_over else self._count(engine.name))

    def found_late(self, engine: str) -> None:
        """Count an engine whose death was found late, perhaps only when it was to end."""
        if engine in self._roles and engine not in self._counted:
            self._count(engine)

    def _count(self, engine: str) -> None:
        self._counted.add(engine)
        self._meter.add(LOST, engine=engine, role=self._roles[engine])
