"""Keep virtual time: the world's, which events move on, and an engine's, which runs ahead of it in a turn."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], object]


MIN_CANCELLED = 1024
"""Cancelled events are taken out when they are more than so many, and than those that are not."""
TURNS = 1 << 32
"""Added to an engine's number: the order of its turns among what happens at one time."""


@dataclass(slots=True, eq=False)
class Event:
    """Something that is to happen."""

    at_ns: int
    action: Action | None  # None: it was cancelled


class EventQueue:
    """The world's clock. Calling it tells the time, in ns since the simulation began.

    What happens at one time happens in this order: plain events, as they were planned; what engines tell, by
    the engines' numbers; engines' turns, likewise. So it does not matter to others when an engine planned
    what it tells: after each step, or after many.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_events = 0  # that happened
        self._reached = 0  # the last order of what has happened now
        self._heap: list[tuple[int, int, int, Event]] = []
        self._num_planned = 0
        self._num_engines = 0
        self._num_cancelled = 0  # of those in the heap

    def __call__(self) -> int:
        return self.now_ns

    def enlist(self) -> int:
        """Give an engine its number, from 1: the order of what it tells. Its turns have TURNS more."""
        self._num_engines += 1
        return self._num_engines

    def at(self, at_ns: int, action: Action, order: int = 0) -> Event:
        """Plan an action, at once if its time has passed. `order`: 0, or that of an engine."""
        self._num_planned += 1
        event = Event(max(at_ns, self.now_ns), action)
        heapq.heappush(self._heap, (event.at_ns, order, self._num_planned, event))
        return event

    def has_reached(self, order: int) -> bool:
        """Tell whether what has this order has happened at the time that it is, or happens right now."""
        return order <= self._reached

    def cancel(self, event: Event) -> None:
        """Have nothing happen at this event, which may be over."""
        if event.action is None:
            return
        event.action = None
        self._num_cancelled += 1
        if self._num_cancelled > MIN_CANCELLED and self._num_cancelled > len(self._heap) // 2:
            # Deadlines that nobody needs would else be kept until they come.
            self._heap[:] = [entry for entry in self._heap if entry[-1].action is not None]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    def run(self, until_ns: int | None = None) -> None:
        """Let everything happen that is planned up to `until_ns`, and what that plans, in order."""
        heap = self._heap
        while heap and (until_ns is None or heap[0][0] <= until_ns):
            at_ns, order, _, event = heapq.heappop(heap)
            if event.action is None:
                self._num_cancelled -= 1
                continue  # cancelled: no time passes for it
            self._reached = order if at_ns > self.now_ns else max(order, self._reached)
            self.now_ns = at_ns
            self.num_events += 1
            action, event.action = event.action, None
            action()


class LocalClock:
    """An engine's clock. In a turn the engine's own work moves it on; between turns it shows the world's."""

    def __init__(self, world: Callable[[], int]) -> None:
        self._world = world
        self._in_turn = False
        self.end_ns = 0
        """When the last turn ended, or how far the one under way has come."""

    def __call__(self) -> int:
        return self.end_ns if self._in_turn else self._world()

    def advance(self, length_ns: int) -> None:
        """Take time, in a turn."""
        assert self._in_turn, "nothing takes time between turns"
        assert length_ns >= 0, length_ns
        self.end_ns += length_ns

    def wait_until(self, at_ns: int) -> None:
        """Take time until a moment, in a turn; none if that has passed."""
        self.advance(max(0, at_ns - self.end_ns))

    def begin_turn(self) -> None:
        self.end_ns = max(self.end_ns, self._world())
        self._in_turn = True

    def end_span(self, at_ns: int) -> None:
        """Go on in the last of several turns, which were counted elsewhere: its step ends at this time."""
        self.end_ns = at_ns
        self._in_turn = True

    def end_turn(self) -> None:
        self._in_turn = False
