"""A load as it is sent: on schedule, whatever the server does, with an eye on its own punctuality.

Latencies of an open load count from the time a request was *due*, not from the time it left: a generator
that waits for a slow server would otherwise leave out the requests which had to wait (coordinated omission;
G. Tene, How NOT to Measure Latency, 2013; B. Schroeder et al., Open Versus Closed: A Cautionary Tale, NSDI
2006). A closed load has no schedule: its latencies count from sending, and say nothing of waiting before it.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import aiohttp

from rayk.bench.client import Observed, request_body, send
from rayk.bench.load import Load
from rayk.bench.prompts import Planned
from rayk.traces.replay import Replay

LEAD_S = 0.05  # from the moment that all is drawn to the schedule's start
WATCH_S = 0.01
KEEPALIVE_S = 3.0  # idle connections close before servers close them (uvicorn: 5 s)
SPARE_FILES = 64
NS_PER_S = 1_000_000_000


@dataclass(kw_only=True, slots=True)
class Sent:
    """A load as sent. Filled while it runs, so that an interrupted one leaves what it has."""

    requests: list[Observed] = field(default_factory=list)  # in order of their due times
    began_ns: int = 0
    ended_ns: int = 0
    # how late the generator's own event loop woke up, some 100 times a second: every stamp may be as late
    loop_lags_ns: list[int] = field(default_factory=list)
    cpu_ns: int = 0  # this process's, while the load ran


OnEnded = Callable[[Observed], None]  # called when a request has ended


async def drive(
    load: Load, model: str, planned: Sequence[Planned], sent: Sent, on_ended: OnEnded = lambda _: None
) -> None:
    """Send a load and wait until every request has ended, each within the load's timeout."""
    bodies = [request_body(load, p, model) for p in planned]
    allow_files(len(planned) if load.is_open else load.concurrency or 1)
    url = f"{load.url.rstrip('/')}/v1/{'chat/completions' if load.use_chat else 'completions'}"
    async with make_session(load) as session:

        async def one(seen: Observed) -> None:
            await send(session, url, bodies[seen.planned.index], seen, load.timeout_s)
            on_ended(seen)

        # What was drawn stays: nobody needs to look through it for garbage while requests are due.
        gc.collect()
        gc.freeze()
        watcher = asyncio.create_task(_watch(sent.loop_lags_ns))
        cpu_ns = time.process_time_ns()
        try:
            await (_open if load.is_open else _closed)(load, planned, sent, one)
        finally:
            watcher.cancel()
            gc.unfreeze()
            sent.ended_ns = time.monotonic_ns()
            sent.cpu_ns = time.process_time_ns() - cpu_ns


def make_session(load: Load) -> aiohttp.ClientSession:
    """Make a session without limits of its own on connections or time."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=load.timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


def allow_files(num_requests: int) -> None:
    """Let this process have a connection per request, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = num_requests + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        num_files = min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


One = Callable[[Observed], Coroutine[None, None, None]]


async def _open(load: Load, planned: Sequence[Planned], sent: Sent, one: One) -> None:
    """Send each request when it is due, waiting for nothing but its session's last answer."""
    del load
    sent.began_ns = time.monotonic_ns() + round(LEAD_S * NS_PER_S)
    replay = Replay(planned)
    has_ended = asyncio.Event()

    async def turn(number: int, seen: Observed) -> None:
        await one(seen)
        replay.ended(number, seen.ended_ns - sent.began_ns)
        has_ended.set()

    async with asyncio.TaskGroup() as group:
        while (due_ns := replay.next_due_ns()) is not None or replay.is_waiting:
            left_s = None
            if due_ns is not None:
                left_s = max(0, sent.began_ns + due_ns - time.monotonic_ns()) / NS_PER_S
            if replay.is_waiting and left_s != 0:
                # An answer may make another request due, and earlier.
                has_ended.clear()
                if await _wait(has_ended, left_s):
                    continue
            else:
                # Also of one that is late already, others must get their turn.
                await asyncio.sleep(left_s or 0)
            due_ns, number, p = replay.take()
            seen = Observed(planned=p, due_ns=sent.began_ns + due_ns)
            sent.requests.append(seen)
            group.create_task(turn(number, seen))


async def _wait(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for an event; False where it did not come in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _closed(load: Load, planned: Sequence[Planned], sent: Sent, one: One) -> None:
    """Keep `concurrency` requests in flight until none is left."""
    sent.began_ns = time.monotonic_ns()
    left = iter(planned)

    async def user() -> None:
        for p in left:
            seen = Observed(planned=p, due_ns=time.monotonic_ns())
            sent.requests.append(seen)
            await one(seen)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency or 1, len(planned))):
            group.create_task(user())


async def _watch(lags_ns: list[int]) -> None:
    """Note how late this event loop wakes up, until cancelled."""
    while True:
        due_ns = time.monotonic_ns() + round(WATCH_S * NS_PER_S)
        await asyncio.sleep(WATCH_S)
        lags_ns.append(max(0, time.monotonic_ns() - due_ns))
