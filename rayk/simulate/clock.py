"""Keep virtual time: the world's, which events move on, and an engine's, which runs ahead of it in a turn."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], object]


@dataclass(slots=True, eq=False)
class Event:
    """Something that is to happen. Events of one time happen in the order in which they were planned."""

    at_ns: int
    number: int
    action: Action | None  # None: it was cancelled


class EventQueue:
    """The world's clock. Calling it tells the time, in ns since the simulation began."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_events = 0  # that happened
        self._heap: list[tuple[int, int, Event]] = []
        self._num_planned = 0

    def __call__(self) -> int:
        return self.now_ns

    def at(self, at_ns: int, action: Action) -> Event:
        """Plan an action, at once if its time has passed."""
        self._num_planned += 1
        event = Event(max(at_ns, self.now_ns), self._num_planned, action)
        heapq.heappush(self._heap, (event.at_ns, event.number, event))
        return event

    def cancel(self, event: Event) -> None:
        """Have nothing happen at this event, which may be over."""
        event.action = None

    def run(self, until_ns: int | None = None) -> None:
        """Let everything happen that is planned up to `until_ns`, and what that plans, in order."""
        heap = self._heap
        while heap and (until_ns is None or heap[0][0] <= until_ns):
            at_ns, _, event = heapq.heappop(heap)
            if event.action is None:
                continue  # cancelled: no time passes for it
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

    def end_turn(self) -> None:
        self._in_turn = False
