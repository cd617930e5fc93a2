"""Where a server's requests are let in, wait and are turned away: real event loops, no engines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rayk.sched.admission import AdmissionController, News
from rayk.sched.dispatcher import Abort, Dispatcher, DispatchRules
from rayk.sched.policies import get_policy
from rayk.sched.policy import Placement, PlacementRequest
from rayk.types.errors import DeadlineExceeded, EngineDied, Overloaded


class Admission(AdmissionController):
    """A controller of requests, its dispatcher, and what it aborted."""

    def __init__(
        self, max_running: int = 1, max_waiting: int = 2, *, opened: bool = True, **how: Any
    ) -> None:
        rules = DispatchRules(hands_over=opened, max_waiting=max_waiting)
        self.dispatcher = Dispatcher(get_policy("round_robin"), rules, max_running=max_running)
        self.aborted: list[Abort] = []
        super().__init__(self.dispatcher, self.aborted.append, **how)
        if opened:
            self.open("decode0", "decode", 1)
            self.open("prefill0", "prefill", 1)

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that have a place, and that wait for one."""
        return self.dispatcher.num_running, self.dispatcher.num_waiting


def place(admission: Admission, name: str, *, again: bool = False, **how: Any) -> asyncio.Task[Placement]:
    """The request's call, begun."""
    asked = PlacementRequest(request_id=name, num_prompt_tokens=2, max_tokens=3)
    call: Coroutine[Any, Any, Placement] = admission.place(
        how.get("front", "f"),
        asked,
        priority=how.get("priority", 0),
        deadline_s=how.get("deadline_s", 60.0),
        again=again,
    )
    return asyncio.ensure_future(call)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def ended(*names: str) -> News:
    return News(ended=names)


def test_whoever_waits_comes_in_by_priority_when_a_request_ends() -> None:
    async def run() -> None:
        admission = Admission()
        calls = {"a": place(admission, "a")}
        await settle()
        calls |= {"b": place(admission, "b"), "c": place(admission, "c", priority=-1)}
        await settle()
        assert calls["a"].result() == Placement(prefill="prefill0", decode="decode0")
        assert admission.counts == (1, 2)
        admission.tell("f", ended("a"))
        await settle()
        assert calls["c"].done()
        assert not calls["b"].done()
        admission.tell("f", ended("c", "b"))
        await settle()
        assert calls["b"].cancelled()
        assert admission.counts == (0, 0)

    asyncio.run(run())


def test_a_full_room_turns_requests_away_but_not_those_that_lost_their_place() -> None:
    async def run() -> None:
        admission = Admission(max_waiting=1)
        first, second, third = (place(admission, name) for name in "abc")
        await settle()
        with pytest.raises(Overloaded):
            third.result()
        again = place(admission, "d", again=True)
        await settle()
        assert not again.done()
        admission.tell("f", ended("a"))
        await settle()
        assert again.done(), "before one that waits since longer, but for the first time"
        assert not second.done()
        second.cancel()
        assert first.done()

    asyncio.run(run())


def test_without_an_engine_of_a_side_requests_wait_until_there_is_one() -> None:
    async def run() -> None:
        admission = Admission(max_running=8, max_waiting=8)
        admission.dispatcher.lost("decode0")
        call = place(admission, "a")
        await settle()
        assert not call.done()
        admission.open("decode1", "decode", 2)
        await settle()
        assert call.result().decode == "decode1"

    asyncio.run(run())


def test_who_waits_past_the_deadline_is_told_so_and_leaves() -> None:
    async def run() -> None:
        admission = Admission(opened=False)
        call = place(admission, "a", deadline_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(call, 30)
        assert admission.dispatcher.num_waiting == 0
        await asyncio.wait_for(admission.drained(), 30)

    asyncio.run(run())


def test_an_engine_has_one_role_at_a_time() -> None:
    async def run() -> None:
        admission = Admission(max_running=8)
        admission.open("decode1", "decode", 1)
        admission.open("decode1", "prefill", 1)
        placed = [await place(admission, name) for name in "abcd"]
        assert {p.decode for p in placed} == {"decode0"}
        assert {p.prefill for p in placed} == {"prefill0", "decode1"}

    asyncio.run(run())


def test_a_silent_fronts_attempts_are_given_back_with_their_engines() -> None:
    async def run() -> None:
        now_ns = 0
        admission = Admission(2, 4, opened=False, clock=lambda: now_ns)
        admission.open("prefill0", "aggregated", 1)
        calls = [place(admission, name, front=front) for name, front in (("a", "x"), ("b", "y"), ("c", "x"))]
        await settle()
        assert [c.done() for c in calls] == [True, True, False]
        now_ns = 10**10
        admission.tell("y", News())
        admission.look_for_silent(5.0)
        assert admission.aborted == [Abort("a", Placement(prefill="prefill0", decode=None))]
        await settle()
        with pytest.raises(EngineDied):  # which has a front that lives after all ask again
            calls[2].result()
        assert admission.dispatcher.num_running == 1
        admission.look_for_silent(5.0)
        assert len(admission.aborted) == 1

    asyncio.run(run())


def test_what_ended_before_it_came_never_takes_a_place() -> None:
    async def run() -> None:
        admission = Admission()
        admission.tell("f", ended("a"))
        with pytest.raises(DeadlineExceeded):
            await place(admission, "a")
        assert admission.dispatcher.num_running == 0

    asyncio.run(run())


def test_asking_twice_for_an_attempt_takes_one_place() -> None:
    async def run() -> None:
        admission = Admission(max_running=3)
        assert await place(admission, "a") == await place(admission, "a")
        assert admission.dispatcher.num_running == 1

    asyncio.run(run())


def test_a_fleet_that_drains_takes_only_what_it_had_taken_before() -> None:
    async def run() -> None:
        admission = Admission(max_running=1, max_waiting=4)
        first, waiting = place(admission, "a"), place(admission, "b")
        await settle()
        admission.dispatcher.is_draining = True
        with pytest.raises(Overloaded):
            await place(admission, "c")
        drained = asyncio.ensure_future(admission.drained())
        again = place(admission, "a~1", again=True)
        await settle()
        assert not drained.done()
        admission.tell("f", ended("a"))
        await settle()
        admission.tell("f", ended("a~1"))
        await settle()
        admission.tell("f", ended("b"))
        await asyncio.wait_for(drained, 30)
        assert {call.result().prefill for call in (first, waiting, again)} == {"prefill0"}

    asyncio.run(run())


def test_who_goes_while_it_waits_is_forgotten_when_its_turn_comes() -> None:
    async def run() -> None:
        admission = Admission()
        first, second = place(admission, "a"), place(admission, "b")
        await settle()
        second.cancel()
        await settle()
        admission.tell("f", ended("a"))
        assert first.done()
        assert admission.counts == (0, 0)
        await asyncio.wait_for(admission.drained(), 30)
        admission.gone("f")
        assert admission.aborted == []
        assert (await place(admission, "b")).prefill == "prefill0", "it was not the front's to forget"

    asyncio.run(run())


def test_a_front_is_gone_with_the_last_of_its_connections() -> None:
    async def run() -> None:
        admission = Admission(max_running=2)
        admission.dispatcher.connected("f")
        admission.dispatcher.connected(
            "f"
        )  # it has noticed sooner than the fleet that its first one was lost
        placed = await place(admission, "a")
        admission.disconnected("f")
        assert (admission.aborted, admission.dispatcher.num_running) == ([], 1)
        admission.disconnected("f")
        assert (admission.aborted, admission.dispatcher.num_running) == ([Abort("a", placed)], 0)
        admission.dispatcher.connected("f")
        admission.disconnected("f")
        assert len(admission.aborted) == 1

    asyncio.run(run())
