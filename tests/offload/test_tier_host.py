"""The process of a host tier, without Ray: its callers get an answer, or hear that the tier has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rayk.actors.tier_actor import TierHost
from rayk.types.errors import EngineDied, UserError
from tests.pd import HANG_S


class Tier:
    """Answers every other question, and fails when it is told to."""

    is_busy = False

    def __init__(self) -> None:
        self.fails = self.is_closed = False
        self._late: list[Callable[[str], None]] = []

    def store(self, ask: Any, done: Callable[[Any], None]) -> None:
        if ask == "wrong":
            raise UserError("it is wrong", "here", "mend it")
        if ask == "late":
            self._late.append(done)
        else:
            done(f"stored {ask}")

    def turn(self) -> None:
        if self.fails:
            raise ValueError("a bug")

    def close(self) -> None:
        """What is under way ends when files are closed."""
        self.is_closed = True
        for done in self._late:
            done("too late")


def start() -> tuple[TierHost, Tier]:
    host, tier = TierHost("t"), Tier()
    host._tier = tier  # type: ignore[assignment]
    host._thread = threading.Thread(target=host._run, daemon=True)
    host._thread.start()
    return host, tier


async def ask(host: TierHost, what: Any) -> Any:
    async with asyncio.timeout(HANG_S):
        return await host.store(what)


async def until_asked(host: TierHost, num: int) -> None:
    """Until the tier's thread has seen so many questions that it has not answered."""
    while sum(future.running() for future in host._waiting) < num:
        await asyncio.sleep(0.001)


def test_answers_and_refusals_reach_who_asked() -> None:
    async def play() -> None:
        host, tier = start()
        assert await asyncio.gather(*(ask(host, i) for i in range(20))) == [f"stored {i}" for i in range(20)]
        with pytest.raises(UserError, match="it is wrong"):
            await ask(host, "wrong")
        assert await ask(host, "on") == "stored on"
        await host.close()
        assert tier.is_closed
        with pytest.raises(EngineDied, match="it was closed"):
            await ask(host, "more")

    asyncio.run(play())


@pytest.mark.parametrize("end", ["closed", "failed"])
def test_who_waits_hears_that_the_tier_has_ended(end: str) -> None:
    async def play() -> None:
        host, tier = start()
        waiting = [asyncio.create_task(ask(host, "late")) for _ in range(5)]
        await until_asked(host, 5)
        waiting[0].cancel()
        if end == "closed":
            await host.close()
        else:
            tier.fails = True
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        why = "it was closed" if end == "closed" else "ValueError: a bug"
        assert [str(error) for error in found[1:]] == [str(EngineDied("t", why))] * 4
        with pytest.raises(EngineDied):
            await ask(host, "more")
        await asyncio.to_thread(host._thread.join, HANG_S)
        assert tier.is_closed
        assert not host._waiting

    asyncio.run(play())
