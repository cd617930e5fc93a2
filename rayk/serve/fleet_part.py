"""The fleet of engines as the driver keeps it alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from rayk.actors import launch
from rayk.actors.serving import EngineAccount
from rayk.serve.engine_news import EngineNews
from rayk.serve.supervisor import READY_S
from rayk.specs.serving import ServerSettings
from rayk.types.errors import DeadlineExceeded, EngineDied, InternalError, RaykError
from rayk.types.waiting import busy

LOOK_S = 0.5
"""The fleet is asked for a sign of life this often."""
PATIENCE_S = 15.0
"""A fleet that does not answer for so long hangs: it is killed."""
GRACE_S = 10.0
"""An answer may take this much longer than it was asked to wait."""


def _keep_quiet(_line: str) -> None:
    pass


class FleetPart:
    """Keeps the fleet, as a supervisor.Part. Workers end with the fleet they belong to; the next one starts
    others."""

    name = "the fleet of engines"

    def __init__(
        self, actor_name: str, settings: ServerSettings, say: Callable[[str], None] = _keep_quiet
    ) -> None:
        """`say` is told what befalls engines, for people."""
        self._actor_name = actor_name
        self._settings = settings
        self._say = say
        self._actor: Any = None
        self.accounts: tuple[EngineAccount, ...] = ()
        """What each engine left, once the fleet was stopped."""

    async def start(self) -> None:
        """Form every engine. Raises RaykError where one cannot be, DeadlineExceeded after READY_S."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)  # a dead actor keeps its name as long as it has a handle
        self._actor = await asyncio.to_thread(launch.start_fleet, self._actor_name, self._settings)
        try:
            async with asyncio.timeout(READY_S):
                await _answer(self._actor.start.remote())
        except TimeoutError:
            ray.kill(self._actor, no_restart=True)
            raise DeadlineExceeded(f"the start of {self.name}", READY_S, busy()) from None

    async def lost(self) -> str:
        """Wait until the fleet is lost, and tell why; one that hangs is ended. Tells of its engines
        meanwhile. Raises InternalError where a bug ended its watch over them."""
        news = EngineNews()
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    found = await self._actor.health.remote()
                for line in news.see(found.engines):
                    self._say(line)
            except RayActorError:
                return "its process ended"
            except TimeoutError:
                ray.kill(self._actor, no_restart=True)
                return f"it hangs: no answer in {PATIENCE_S:g} s"
            except RayError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, InternalError):
                    raise cause from None  # the next one would end the same
                return str(error).strip().splitlines()[-1]
            await asyncio.sleep(LOOK_S)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones; returns how many are left after `timeout_s`."""
        if self._actor is None:
            return 0
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return int(await _answer(self._actor.drain.remote(timeout_s)))
        except EngineDied:
            return 0
        except TimeoutError:
            raise DeadlineExceeded("the end of running requests", timeout_s + GRACE_S) from None

    async def give_up(self) -> None:
        """Have fronts end every request with an error, at once: the cluster goes."""
        if self._actor is not None:
            with contextlib.suppress(RayError, RaykError, TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await _answer(self._actor.drain.remote(0.0))

    async def stop(self) -> None:
        """End every engine in order, then the process."""
        if self._actor is None:
            return
        try:
            self.accounts = tuple(await _answer(self._actor.stop.remote()))
        finally:
            ray.kill(self._actor, no_restart=True)


async def _answer(reply: Any) -> Any:
    """Await a reply of the fleet. Raises its RaykError, or EngineDied where the fleet is gone."""
    try:
        return await reply
    except RayActorError as error:
        raise EngineDied("the fleet", "its process ended") from error
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RaykError):
            raise cause from None
        raise
