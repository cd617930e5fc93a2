"""Ranks of a running server killed again and again, and what that does to the tokens that clients get. Of
jobs/serve_stress.py."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rayk.types.errors import DeadlineExceeded, RaykError

WINDOW_S = 5.0
"""Tokens per second are those of so long a window."""
STEP_S = 0.1
"""Windows are looked at so often."""
BACK_S = 20.0
"""Throughput must be back so soon."""
BACK_SHARE = 0.5
"""Of the median before the first kill: at this, throughput is back."""
POLL_S = 0.1
RESTART_S = 180.0
"""Deadline of an engine's next life."""
SETTLE_S = 10.0
"""Between the kills by which restarts are measured."""
CALL_S = 10.0

Answer = TypeVar("Answer")


@dataclass(kw_only=True, slots=True)
class Kill:
    engine: str
    rank: int
    at_ns: int
    """time.monotonic_ns."""
    epoch: int
    """Of the engine's life that it ended."""
    load: float = 0.0
    """Of the machine then: processes that ran or waited for a core, over the last minute."""
    restart_s: float | None = None
    """Until the engine took requests again; None: it has not."""
    whole_s: float | None = None
    """Until the spares were there again, too, where that was waited for."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Of the restart, as the fleet saw it; see actors.members.Member.restart."""


class Throughput:
    """Tokens that clients got, by time."""

    def __init__(self, times_ns: Sequence[int], counts: Sequence[int]) -> None:
        """Chunks in any order: when each was read, and how many tokens it had."""
        order = np.argsort(np.asarray(times_ns, dtype=np.int64), kind="stable")
        self._times_s = np.asarray(times_ns, dtype=np.int64)[order] / 1e9
        self._sums = np.concatenate(([0], np.cumsum(np.asarray(counts, dtype=np.int64)[order])))

    def rate(self, end_s: float) -> float:
        """Tokens per second over the window that ends then."""
        first, last = np.searchsorted(self._times_s, [end_s - WINDOW_S, end_s], side="right")
        return float(self._sums[last] - self._sums[first]) / WINDOW_S

    def median(self, begin_s: float, end_s: float) -> float | None:
        """Of all windows between two times; None where there is no room for one."""
        rates = [self.rate(begin_s + after_s) for after_s in _window_ends(end_s - begin_s)]
        return statistics.median(rates) if rates else None

    def back_s(self, kill_s: float, until_s: float, enough: float) -> float | None:
        """How long after a kill the first window ends that lies wholly behind it and has `enough` tokens per
        second: at least WINDOW_S. None where none does before `until_s`."""
        ends = _window_ends(until_s - kill_s)
        return next((after_s for after_s in ends if self.rate(kill_s + after_s) >= enough), None)


def _window_ends(length_s: float) -> list[float]:
    """Ends of the windows that lie wholly within a time, from its beginning."""
    count = math.floor((length_s - WINDOW_S) / STEP_S + 1e-9) + 1
    return [WINDOW_S + STEP_S * i for i in range(count)]


class Killer:
    """Kills ranks of a server on this machine. `fleet` is its Fleet actor."""

    def __init__(self, fleet: Any, seed: int) -> None:
        self._fleet = fleet
        self._draw = random.Random(f"kills {seed}")
        self.kills: list[Kill] = []
        self._watching: set[asyncio.Task[None]] = set()

    async def measure(self, num_spares: int) -> float:
        """Kill a rank of each engine, one after the other; the mean time until all is as it was before, the
        spares included, seconds: what is killed faster than it comes back is gone some day."""
        await self._until_spares(num_spares)
        engines = sorted(row["name"] for row in await self.engines())
        for engine in engines:
            kill = await self._kill(engine)
            await self._until_restarted(kill)
            await self._until_spares(num_spares)
            kill.whole_s = (time.monotonic_ns() - kill.at_ns) / 1e9
            await asyncio.sleep(SETTLE_S)
        return statistics.mean(k.whole_s for k in self.kills if k.whole_s is not None)

    async def _until_spares(self, wanted: int) -> None:
        async def are_there() -> bool:
            return bool(await until_told(lambda: self._fleet.num_spares.remote(), "its spares") >= wanted)

        if not await until_true(are_there, RESTART_S):
            raise DeadlineExceeded(f"{wanted} spares", RESTART_S)

    async def go_on(self, period_s: float, duration_s: float) -> None:
        """Kill any rank of any engine that lives, every `period_s`; return when the last one lives again."""
        began = time.monotonic()
        for number in range(math.ceil(duration_s / period_s)):
            await asyncio.sleep(max(0.0, began + number * period_s - time.monotonic()))
            kill = await self._kill(None)
            task = asyncio.create_task(self._until_restarted(kill))
            self._watching.add(task)
        await asyncio.gather(*self._watching)

    async def engines(self) -> list[dict[str, Any]]:
        """Name, state and epoch of each, as the fleet says."""
        health = await until_told(lambda: self._fleet.health.remote(), "how engines are")
        return list(health.engines)

    async def _kill(self, engine: str | None) -> Kill:
        until = time.monotonic() + RESTART_S
        while True:
            pids = await until_told(lambda: self._fleet.pids.remote(), "the ranks' processes")
            names = sorted(pids) if engine is None else [engine] if engine in pids else []
            if names:
                break
            if time.monotonic() > until:
                raise DeadlineExceeded("an engine to kill", RESTART_S)
            await asyncio.sleep(POLL_S)
        name = self._draw.choice(names)
        rank = self._draw.randrange(len(pids[name]))
        epochs = {row["name"]: row["epoch"] for row in await self.engines()}
        load = os.getloadavg()[0]
        kill = Kill(engine=name, rank=rank, at_ns=time.monotonic_ns(), epoch=epochs[name], load=load)
        os.kill(pids[name][rank], signal.SIGKILL)
        self.kills.append(kill)
        return kill

    async def _until_restarted(self, kill: Kill) -> None:
        """Wait for the engine's next life. Raises DeadlineExceeded."""
        until = time.monotonic() + RESTART_S
        while True:
            rows = {row["name"]: row for row in await self.engines()}
            now = rows.get(kill.engine, {})
            since_s = (time.monotonic_ns() - kill.at_ns) / 1e9
            if now.get("state") == "ready" and now["epoch"] > kill.epoch:
                kill.restart_s, kill.parts = since_s, dict(now.get("restart", {}))
                return
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the next life of {kill.engine}", RESTART_S, now)
            await asyncio.sleep(POLL_S)


async def until_told(ask: Callable[[], Any], what: str) -> Any:
    """An answer of the fleet, asked again where an engine dies meanwhile. Raises DeadlineExceeded."""
    until = time.monotonic() + RESTART_S
    while True:
        try:
            async with asyncio.timeout(CALL_S):
                return await ask()
        except (RaykError, TimeoutError) as error:
            if time.monotonic() > until:
                raise DeadlineExceeded(what, RESTART_S) from error
        await asyncio.sleep(POLL_S)


async def until_true(look: Callable[[], Coroutine[Any, Any, Answer | None]], timeout_s: float) -> bool:
    """Whether `look` says so within this time."""
    until = time.monotonic() + timeout_s
    while not await look():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(POLL_S)
    return True
