"""What the driver of a server does with parts that start, die and end, on fakes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rayk.serve import supervisor
from rayk.serve.supervisor import MAX_LOSSES, GaveUp, Supervisor, stop_parts
from rayk.types.errors import DeviceError, EngineDied, RaykError, UserError

FOREVER_S = 60.0


class FakePart:
    """Lives as long as the test says. `errors`: what its starts raise, one after the other."""

    def __init__(self, name: str, *errors: RaykError | None) -> None:
        self.name = name
        self.errors = list(errors)
        self.num_starts = 0
        self.is_stopped = False
        self.why: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.num_starts += 1
        self.why = asyncio.get_running_loop().create_future()
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error

    async def lost(self) -> str:
        return await self.why

    async def stop(self) -> None:
        self.is_stopped = True

    async def lives(self, num_starts: int) -> None:
        await until(lambda: self.num_starts >= num_starts and not self.why.done())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(FOREVER_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)


class Run:
    """A supervisor at work."""

    def __init__(self, *parts: FakePart) -> None:
        self.said: list[str] = []
        self.num_ready = 0
        self.stop = asyncio.Event()
        self.is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keeper = Supervisor(parts, self.stop, self.said.append)
        self.task = asyncio.create_task(keeper.run(lambda: self.is_ready, self.tell))

    def tell(self) -> None:
        self.num_ready += 1


def test_parts_that_are_lost_start_again_and_others_go_on() -> None:
    async def run() -> None:
        fleet, front = FakePart("fleet"), FakePart("front")
        running = Run(fleet, front)
        await fleet.lives(1)
        await front.lives(1)
        assert running.num_ready == 0
        running.is_ready.set_result(None)
        await until(lambda: running.num_ready == 1)
        fleet.why.set_result("it was killed")
        await fleet.lives(2)
        await until(lambda: len(running.said) == 2)
        assert running.said[0] == "fleet is lost (it was killed); starting it again"
        assert re.fullmatch(r"fleet is ready again after \d+\.\d s", running.said[1])
        assert front.num_starts == 1
        running.stop.set()
        await running.task
        assert (fleet.num_starts, running.num_ready) == (2, 1)
        assert not fleet.is_stopped, "whoever runs it drains it first"

    asyncio.run(run())


def test_a_start_that_fails_once_it_had_lived_is_tried_again() -> None:
    async def run() -> None:
        fleet = FakePart("fleet", None, EngineDied("fleet", "its process ended"), None)
        running = Run(fleet)
        await fleet.lives(1)
        fleet.why.set_result("killed")
        await fleet.lives(3)
        await until(lambda: len(running.said) == 3)
        running.stop.set()
        await running.task
        lost, lost_again, back = running.said
        assert lost == "fleet is lost (killed); starting it again"
        assert lost_again == "fleet is lost (engine fleet died: its process ended); starting it again"
        assert back.startswith("fleet is ready again after ")

    asyncio.run(run())


@pytest.mark.parametrize("error", [EngineDied("prefill0", "it is out of memory"), DeviceError("no GPU")])
def test_a_first_start_that_fails_ends_it(error: RaykError) -> None:
    async def run() -> None:
        running = Run(FakePart("fleet", error))
        with pytest.raises(type(error)):
            await running.task

    asyncio.run(run())


def test_bad_input_at_a_later_start_ends_it() -> None:
    async def run() -> None:
        front = FakePart("front", None, UserError("somebody took the port"))
        running = Run(front)
        await front.lives(1)
        front.why.set_result("killed")
        with pytest.raises(UserError, match="took the port"):
            await running.task

    asyncio.run(run())


def test_what_is_lost_again_and_again_is_given_up() -> None:
    async def run() -> None:
        front = FakePart("front")
        running = Run(front)
        for life in range(1, MAX_LOSSES + 1):
            await front.lives(life)
            front.why.set_result(f"death {life}")
        with pytest.raises(GaveUp, match=f"front was lost {MAX_LOSSES} times.*death {MAX_LOSSES}"):
            await running.task
        assert front.num_starts == MAX_LOSSES

    asyncio.run(run())


def test_a_start_that_takes_long_does_not_make_a_part_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow(FakePart):
        async def start(self) -> None:
            await super().start()
            clock[0] += 2 * supervisor.STEADY_S
            assert self.num_starts <= MAX_LOSSES, "started for ever"
            self.why.set_result("it died young")

    async def run() -> None:
        with pytest.raises(GaveUp):
            await Run(Slow("fleet")).task

    asyncio.run(run())


def test_losses_of_a_part_that_was_steady_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STEADY_S", -1.0)

    async def run() -> None:
        front = FakePart("front")
        running = Run(front)
        for life in range(1, 3 * MAX_LOSSES):
            await front.lives(life)
            front.why.set_result("killed")
        await front.lives(3 * MAX_LOSSES)
        running.stop.set()
        await running.task

    asyncio.run(run())


def test_a_stop_before_the_start_is_over_ends_it_quietly() -> None:
    async def run() -> None:
        fleet = FakePart("fleet")
        running = Run(fleet)
        running.stop.set()
        await running.task
        assert running.num_ready == 0

    asyncio.run(run())


def test_every_part_is_stopped_whatever_becomes_of_others() -> None:
    class Stubborn(FakePart):
        async def stop(self) -> None:
            await asyncio.sleep(FOREVER_S)

    class Broken(FakePart):
        async def stop(self) -> None:
            raise EngineDied("decode0", "it is gone")

    class Foreign(FakePart):
        async def stop(self) -> None:
            raise ValueError("no controller")

    async def run() -> None:
        said: list[str] = []
        last = FakePart("last")
        await stop_parts(
            (Stubborn("stubborn"), Broken("broken"), Foreign("foreign"), last), 0.05, said.append
        )
        assert last.is_stopped
        assert said == [
            "the end of stubborn exceeded its deadline of 0.05 s",
            "broken did not end well: engine decode0 died: it is gone",
            "foreign did not end well: no controller",
        ]

    asyncio.run(run())
