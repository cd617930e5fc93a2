"""Whoever asks a fleet for a place gets what its dispatcher decides, once it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayk.sched.dispatcher import Abort, Action, Dispatcher, Place, Refuse
from rayk.sched.policy import Placement, PlacementRequest
from rayk.sched.waiting_room import NS_PER_S


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What a front tells of its requests, by their attempts' ids. Also its sign of life."""

    prefilled: tuple[str, ...] = ()
    """The first token is here."""
    ended: tuple[str, ...] = ()
    """Requests that are over, however they ended, or not wanted any more."""


class AdmissionController:
    """Carries out what a dispatcher decides about requests. Runs on one event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        abort: Callable[[Abort], object],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._dispatcher = dispatcher
        self._abort = abort
        self._clock = clock
        self._answers: dict[str, asyncio.Future[Placement]] = {}
        """What those wait for that asked for a place."""
        self._alarm: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def place(
        self, front: str, asked: PlacementRequest, *, priority: int, deadline_s: float, again: bool
    ) -> Placement:
        """Engines for a request, once there is room. `again`: it had a place and lost it.

        Raises Overloaded where too many wait or the server is about to end, DeadlineExceeded, and EngineDied
        where the front is taken for gone meanwhile.
        """
        name = asked.request_id
        assert name not in self._answers, f"{name} waits already"
        answer: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._answers[name] = answer
        self._carry_out(
            self._dispatcher.arrive(
                front, asked, self._clock(), priority=priority, deadline_s=deadline_s, again=again
            )
        )
        try:
            return await answer
        except asyncio.CancelledError:
            if self._answers.pop(name, None) is not None:  # whoever asked has gone
                self._carry_out(self._dispatcher.ended((name,), self._clock()))
            raise

    def tell(self, front: str, news: News) -> None:
        """A front tells of its requests."""
        now_ns = self._clock()
        self._dispatcher.heard(front, now_ns)
        for name in news.prefilled:
            self._dispatcher.prefilled(name)
        self._carry_out(self._dispatcher.ended(news.ended, now_ns))

    def open(self, engine: str, role: str, num_ranks: int) -> None:
        """An engine takes requests from now on."""
        self._carry_out(self._dispatcher.open(engine, role, num_ranks, self._clock()))

    def look_for_silent(self, silent_s: float) -> None:
        """End the requests of fronts that were not heard of for so long."""
        self._carry_out(self._dispatcher.silent(silent_s, self._clock()))

    def disconnected(self, front: str) -> None:
        """One of a front's connections has ended."""
        self._carry_out(self._dispatcher.disconnected(front, self._clock()))

    def gone(self, front: str) -> None:
        """A front ends."""
        self._carry_out(self._dispatcher.gone(front, self._clock()))

    async def drained(self) -> None:
        """Wait until no request has a place or waits for one."""
        await self._idle.wait()

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Abort):
                self._abort(action)
            elif (answer := self._answers.get(action.name)) is not None and not answer.done():
                del self._answers[action.name]
                if isinstance(action, Place):
                    answer.set_result(action.placement)
                elif isinstance(action, Refuse):
                    answer.set_exception(action.error)
                else:
                    answer.cancel()
        num_waiting = self._dispatcher.num_waiting
        if num_waiting or self._dispatcher.num_running:
            self._idle.clear()
        else:
            self._idle.set()
        if num_waiting or self._alarm is not None:
            self._set_alarm()

    def _set_alarm(self) -> None:
        """Wake up when the next deadline of those who wait is over."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if (first_ns := self._dispatcher.next_deadline_ns) is not None:
            delay_s = max(0.0, (first_ns - self._clock()) / NS_PER_S)
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._alarm = None
        self._carry_out(self._dispatcher.expire(self._clock()))
