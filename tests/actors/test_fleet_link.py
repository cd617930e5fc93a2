"""How a front finds its fleet, loses it and tells it: real lines, and no Ray to say where the fleet is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from rayk.actors import fleet_link as link_module
from rayk.actors.fleet_link import FleetLink
from rayk.actors.router import Router
from rayk.actors.serving import EngineCard
from rayk.lines.line import Line, LineAddress, LineLost, LineService
from rayk.specs.serving import EngineEntry, ServerSettings
from rayk.types.config import EngineConfig
from rayk.types.errors import DeadlineExceeded
from rayk.types.serving import ModelCard
from tests.markers import thorough

LIMIT_S = 60.0


def make_link() -> FleetLink:
    """A router's."""
    card = ModelCard(model_id="m", folder="m", vocab_size=500, max_positions=64)
    entry = EngineEntry(name="p", role="aggregated", config=EngineConfig(model="m"))
    return Router("fleet", ServerSettings(model=card, engines=(entry,)))._link


class Fleet:
    """One life of it."""

    def __init__(self, name: str) -> None:
        self.present_fronts = 0
        self._name = name
        self._service = LineService(calls={"who": self._who}, streams={"present": self._present})
        self._address: LineAddress | None = None
        self.line = self

    async def open(self) -> Fleet:
        self._address = await self._service.open("127.0.0.1")
        return self

    async def close(self) -> None:
        await self._service.close()

    async def remote(self) -> LineAddress:
        """As an actor's method."""
        assert self._address is not None
        return self._address

    async def _who(self) -> str:
        return self._name

    async def _present(self, _front: str) -> AsyncIterator[bool]:
        self.present_fronts += 1
        try:
            yield False
            await asyncio.Event().wait()
        finally:
            self.present_fronts -= 1


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_fleet_that_was_lost_is_looked_for_before_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        fleets = [await Fleet("first").open(), await Fleet("second").open()]
        found = fleets.copy()
        monkeypatch.setattr(link_module.ray, "get_actor", lambda *_, **__: found.pop(0))
        link = make_link()
        assert await link.call("who", until=time.monotonic()) == "first"
        await until(lambda: fleets[0].present_fronts == 1)
        await fleets[0].close()
        await until(lambda: fleets[0].present_fronts == 0)
        await until(lambda: link._presence is not None and link._presence.done())
        assert await link.call("who", until=time.monotonic()) == "second"
        await until(lambda: fleets[1].present_fronts == 1)
        await link.close()
        await until(lambda: fleets[1].present_fronts == 0)
        await fleets[1].close()

    asyncio.run(run())


def test_a_call_that_is_lost_late_leaves_the_line_that_others_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        """Lost when it is let go on."""

        go = asyncio.Event()

        async def call(self, *_: Any) -> None:
            await self.go.wait()
            raise LineLost("the first one")

    class Good:
        async def call(self, *_: Any) -> str:
            return "here"

    def nobody(*_: Any, **__: Any) -> None:
        raise ValueError("no such actor")

    async def run() -> None:
        monkeypatch.setattr(link_module.ray, "get_actor", nobody)
        link, late, good = make_link(), Late(), Good()
        link._line = cast(Line, late)
        call = asyncio.create_task(link.call("who", until=time.monotonic() + LIMIT_S))
        await asyncio.sleep(0.01)
        link._line = cast(Line, good)
        late.go.set()
        assert await call == "here"
        assert cast(Any, link._line) is good

    asyncio.run(run())


@thorough
def test_news_go_on_after_a_fleet_that_answers_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, ...]] = []

    async def call(_method: str, _front: str, news: Any, *, until: float) -> None:
        told.append(news.ended)
        if len(told) == 1:
            raise DeadlineExceeded("the news", until)

    async def run() -> None:
        link = make_link()
        monkeypatch.setattr(link, "call", call)
        carrying = asyncio.create_task(link.carry(LIMIT_S))
        for number, name in enumerate("ab"):
            link.ended(name)
            await asyncio.wait(
                {asyncio.create_task(until(lambda n=number: len(told) > n)), carrying},
                return_when=asyncio.FIRST_COMPLETED,
            )
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)
        assert told == [("a",), ("b",)]

    asyncio.run(run())


@pytest.mark.parametrize("path", ["direct", "host"])
def test_a_host_tier_that_was_found_dead_is_asked_for_until_another_is_there(
    path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests go through one; the engine stays the one that was known."""
    monkeypatch.setattr(link_module, "FLEET_POLL_S", 0.001)
    config = EngineConfig(model="m")
    told = iter(["old", None, None, "new", "newest"])
    asked = []

    async def call(method: str, *, until: float) -> Any:
        del until
        asked.append(method)
        address = LineAddress("127.0.0.1", 1, b"")
        facts = {"name": "p", "role": "prefill", "epoch": 1, "config": config, "workers": ()}
        return "life", (EngineCard(**facts, line=address, tier=next(told)),)

    async def run() -> None:
        link = FleetLink("fleet", "ns", "front", lambda: None, needs_tiers=path == "host")
        monkeypatch.setattr(link, "call", call)
        engine = await link.engine("life", ("p", 1))
        assert engine.tier == "old"
        assert (await link.engine("life", ("p", 1))).tier == "old"
        assert len(asked) == 1
        engine.tier = None
        again = await link.engine("life", ("p", 1))
        assert again is engine
        assert (again.tier, len(asked)) == (("new", 4) if path == "host" else (None, 1))

    asyncio.run(run())


def test_a_host_tier_that_never_comes_is_not_waited_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "FLEET_POLL_S", 0.001)
    monkeypatch.setattr(link_module, "TIER_S", 0.05)

    async def call(method: str, *, until: float) -> Any:
        del method, until
        facts = {"name": "p", "role": "prefill", "epoch": 1, "config": EngineConfig(model="m"), "workers": ()}
        return "life", (EngineCard(**facts, line=LineAddress("127.0.0.1", 1, b"")),)

    async def run() -> None:
        link = FleetLink("fleet", "ns", "front", lambda: None, needs_tiers=True)
        monkeypatch.setattr(link, "call", call)
        async with asyncio.timeout(LIMIT_S):
            assert (await link.engine("life", ("p", 1))).tier is None

    asyncio.run(run())
