"""What keeps a server's parts alive: each is started, watched, started again when it is lost, and ended.

Runs in the driver, which clients never talk to: while a part is started again the others go on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rayk.types.errors import DeadlineExceeded, EngineDied

READY_S = 600.0
"""A part must be ready for its first request within this: weights may be large."""
STEADY_S = 60.0
"""A part that lived this long after its start is steady: earlier losses do not count any more."""
MAX_LOSSES = 8
"""A part that is lost so often without being steady in between is not started again."""
PAUSE_S = 0.2
"""Pause before the second of several restarts; it doubles before each further one."""


class Part(Protocol):
    """A fleet of engines, or a front."""

    name: str
    """What messages call it."""

    async def start(self) -> None:
        """Start it, the first time or again. Raises RaykError: on a restart, EngineDied and DeadlineExceeded
        are no reason to give up."""
        ...

    async def lost(self) -> str:
        """Wait until it is lost, and tell why."""
        ...

    async def stop(self) -> None:
        """End it, even if it was lost meanwhile."""
        ...


class GaveUp(Exception):
    """A part cannot be kept alive."""


class Supervisor:
    """Keeps parts alive until `stop` is set. `say` is told what happens, for people."""

    def __init__(self, parts: Sequence[Part], stop: asyncio.Event, say: Callable[[str], None]) -> None:
        self._parts = parts
        self._stop = stop
        self._say = say

    async def run(
        self, until_ready: Callable[[], asyncio.Future[None]], on_ready: Callable[[], None]
    ) -> None:
        """Start every part at once, tell when `until_ready` comes true, and go on until `stop`.

        The parts are still there afterwards. Raises what a part's start raises, GaveUp, and whatever
        `until_ready` raises, which must have a deadline.
        """
        keepers = [asyncio.create_task(self._keep(part)) for part in self._parts]
        ready = asyncio.ensure_future(until_ready())
        stop = asyncio.create_task(self._stop.wait())
        waiting: set[asyncio.Future[Any]] = {*keepers, ready, stop}
        try:
            while stop in waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                waiting -= done
                for task in done:
                    task.result()  # a keeper ends by an error alone
                if ready in done and stop not in done:
                    on_ready()
        finally:
            for keeper in keepers:
                keeper.cancel()
            ready.cancel()
            stop.cancel()
            await asyncio.gather(*keepers, ready, stop, return_exceptions=True)

    async def _keep(self, part: Part) -> None:
        losses, lost_s = 0, math.nan
        while True:
            began = math.inf
            try:
                await part.start()
                began = time.monotonic()
                if not math.isnan(lost_s):
                    self._say(f"{part.name} is ready again after {began - lost_s:.1f} s")
                    lost_s = math.nan
                why = await part.lost()
            except (EngineDied, DeadlineExceeded) as error:
                if not losses:
                    raise
                why = str(error)  # what was there before can be there again
            if math.isnan(lost_s):
                lost_s = time.monotonic()
            losses = 1 if time.monotonic() - began > STEADY_S else losses + 1
            if losses >= MAX_LOSSES:
                raise GaveUp(f"{part.name} was lost {losses} times, at last of this: {why}")
            self._say(f"{part.name} is lost ({why}); starting it again")
            if losses > 1:
                await asyncio.sleep(PAUSE_S * 2 ** (losses - 2))


async def stop_parts(parts: Sequence[Part], timeout_s: float, say: Callable[[str], None]) -> None:
    """End parts one after the other, each within `timeout_s`; what goes wrong is said, not raised."""
    for part in parts:
        try:
            async with asyncio.timeout(timeout_s):
                await part.stop()
        except TimeoutError:
            say(str(DeadlineExceeded(f"the end of {part.name}", timeout_s)))
        except Exception as error:  # noqa: BLE001 - also what Ray raises: the parts behind it are to end, too
            say(f"{part.name} did not end well: {str(error).strip() or type(error).__name__}")
