"""FleetLink: a front's way to the fleet of its server, over a line that Ray says the address of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from rayk.actors.engines import EngineHandle
from rayk.actors.failures import translate
from rayk.lines.line import Line, LineLost
from rayk.sched.admission import News
from rayk.types.errors import EngineDied, RaykError
from rayk.types.tasks import lasting

FLEET_POLL_S = 0.2
"""How often a fleet that is not there is looked for."""
FLEET_S = 5.0
"""How long the fleet may take to say what it knows."""
TIER_S = 30.0
"""How long requests that go through a host tier wait for another one in a lost one's place."""
PREFILLED_S = 0.02
"""How long the end of a prefill may wait for other news: policies weigh what prompts are still to compute."""


class FleetLink:
    """A front's way to the fleet. It finds a lost fleet again, reports what ends and asks for engines."""

    def __init__(
        self,
        fleet: str,
        namespace: str,
        front: str,
        on_over: Callable[[], None],
        *,
        needs_tiers: bool = False,
    ) -> None:
        """`on_over`: called when the server ends, even with requests under way. `needs_tiers`: requests go
        through host tiers, which may be lost and opened anew."""
        self._on_over = on_over
        self._needs_tiers = needs_tiers
        self._name = fleet
        self._namespace = namespace
        self._front = front
        self._line: Line | None = None
        self._presence: asyncio.Task[None] | None = None
        self._finding = asyncio.Lock()
        self._life = ""
        self._engines: dict[tuple[str, int], EngineHandle] = {}
        self._asking = asyncio.Lock()
        self._prefilled: list[str] = []
        self._ended: list[str] = []
        self._has_news = asyncio.Event()

    async def call(self, method: str, *args: Any, until: float, **kwargs: Any) -> Any:
        """Call a method of the fleet, again where the fleet is lost meanwhile; the last try begins at `until`
        (time.monotonic). Raises what the method raises, and EngineDied where no fleet is found."""
        while True:
            line: Line | None = None
            try:
                line = await self._found()
                return await line.call(method, *args, **kwargs)
            except (RayActorError, LineLost) as error:
                if self._line is line:  # else it was found again meanwhile
                    self._line = None
                if time.monotonic() >= until:
                    raise EngineDied("fleet", f"{self._name} is not there") from error
            except RayError as error:
                raise translate(error, "fleet") from None
            await asyncio.sleep(FLEET_POLL_S)

    async def close(self) -> None:
        """Let go of all lines."""
        lines = [e.line for e in self._engines.values()] + [self._line]
        self._engines, self._line = {}, None
        await asyncio.gather(*(line.close() for line in lines if line is not None))

    async def _found(self) -> Line:
        """Return the line to the fleet; ask Ray for the address where there is none."""
        async with self._finding:
            if self._line is None:
                get: Callable[..., Any] = ray.get_actor
                try:
                    fleet = await asyncio.to_thread(get, self._name, namespace=self._namespace)
                except ValueError as error:
                    raise LineLost(f"no actor {self._name}") from error
                self._line = Line(await fleet.line.remote())
                self._presence = lasting(self._be_present(self._line), "the line to the fleet")
            return self._line

    async def _be_present(self, line: Line) -> None:
        with contextlib.suppress(LineLost):  # whoever calls next looks for it again
            async for is_over in line.stream("present", self._front):
                if is_over:
                    self._on_over()
        if self._line is line:
            self._line = None

    async def engine(self, life: str, key: tuple[str, int]) -> EngineHandle:
        """Return one life of an engine of this life of the fleet. Raises EngineDied where it is over."""
        until = time.monotonic() + TIER_S
        while True:
            engine = await self._known(life, key)
            if not self._needs_tiers or engine.tier is not None or time.monotonic() >= until:
                return engine
            await asyncio.sleep(FLEET_POLL_S)  # another tier is on its way

    async def _known(self, life: str, key: tuple[str, int]) -> EngineHandle:
        async with self._asking:
            if life != self._life or key not in self._engines or self._lacks_tier(key):
                found, cards = await self.call("roster", until=time.monotonic())
                if found != self._life:
                    self._life, self._engines = found, {}
                self._engines = {
                    (c.name, c.epoch): self._engines.get((c.name, c.epoch))
                    or EngineHandle(
                        c.name,
                        c.role,
                        c.epoch,
                        c.config,
                        list(c.workers),
                        c.node,
                        line=Line(c.line),
                        clock_offset_ns=c.clock_offset_ns,
                        tier=c.tier,
                    )
                    for c in cards
                }
                for c in cards:
                    self._engines[c.name, c.epoch].tier = c.tier
        if life != self._life or key not in self._engines:
            raise EngineDied(key[0], "it was lost before the request came to it")
        return self._engines[key]

    async def death(self, life: str, engine: EngineHandle, within_s: float) -> BaseException | None:
        """Return what a life of an engine died of, if the fleet finds that within this time; else None."""
        try:
            async with asyncio.timeout(within_s + FLEET_S):
                asked = (life, engine.name, engine.epoch, within_s)
                found: BaseException | None = await self.call("death", *asked, until=time.monotonic())
        except (RaykError, TimeoutError):
            return None
        return found

    def _lacks_tier(self, key: tuple[str, int]) -> bool:
        """Return whether the engine's tier was found dead: it may have another one by now."""
        return self._needs_tiers and self._engines[key].tier is None

    def prefilled(self, attempt: str) -> None:
        """Report the attempt's first token with the next news, or soon: nobody waits for this."""
        self._prefilled.append(attempt)
        if len(self._prefilled) == 1:
            asyncio.get_running_loop().call_later(PREFILLED_S, self._has_news.set)

    def ended(self, attempt: str) -> None:
        self._ended.append(attempt)
        self._has_news.set()

    async def carry(self, period_s: float) -> None:
        """Send the fleet what is new at once, and a sign of life every `period_s`."""
        while True:
            try:
                async with asyncio.timeout(period_s):
                    await self._has_news.wait()
            except TimeoutError:
                pass
            self._has_news.clear()
            news = News(prefilled=tuple(self._prefilled), ended=tuple(self._ended))
            self._prefilled, self._ended = [], []
            with contextlib.suppress(RaykError):  # with the fleet went all that it knew
                await self.call("tell", self._front, news, until=time.monotonic())
