"""Requests that wait for a place: bounded, by priority, then in order of arrival; deadlines expire.

Pure: times come in, as nanoseconds of one clock, and who waits is the caller's (a future, say). Every call
costs O(log n) of those who wait, for each of them that it lets out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from rayk.sched.keyed_heap import KeyedHeap
from rayk.types.errors import Overloaded

T = TypeVar("T")

NS_PER_S = 10**9
MIN_RETRY_S = 1.0  # where nothing is known; Retry-After counts whole seconds, and 0 invites a storm
MAX_RETRY_S = 60.0
NUM_GAPS = 64  # completions that their pace is measured over


@dataclass(frozen=True, slots=True)
class _WaitingItem(Generic[T]):
    item: T
    deadline_ns: int | None


class WaitingRoom(Generic[T]):
    """See the module.

    >>> room = WaitingRoom[str](max_waiting=2)
    >>> room.enter("a", "A", now_ns=0)
    >>> room.enter("b", "B", priority=-1, now_ns=1)
    >>> room.pop(now_ns=2), room.leave("a"), room.pop(now_ns=3)
    ('B', 'A', None)
    """

    def __init__(self, max_waiting: int) -> None:
        assert max_waiting >= 0, max_waiting
        self.max_waiting = max_waiting
        self._waiting: dict[str, _WaitingItem[T]] = {}
        self._num_arrivals = 0
        self._turns: KeyedHeap[tuple[int, int]] = KeyedHeap()  # by priority, then arrival
        self._deadlines: KeyedHeap[int] = KeyedHeap()  # names with a deadline
        self._pace = Pace()

    def __len__(self) -> int:
        """Count who waits, those included whose deadline has passed and who were not told yet."""
        return len(self._waiting)

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def enter(
        self, name: str, item: T, *, priority: int = 0, deadline_ns: int | None = None, now_ns: int
    ) -> None:
        """Wait under a name, lower priorities first. After the deadline `expire` returns the item, `pop` no
        more. Raises Overloaded where the room is full."""
        assert name not in self._waiting, f"{name} waits already"
        self._pace.begin_wait(now_ns)
        if len(self._waiting) >= self.max_waiting:
            raise self.overloaded(now_ns)
        self._waiting[name] = _WaitingItem(item, deadline_ns)
        self._turns.push(name, (priority, self._num_arrivals))
        self._num_arrivals += 1
        if deadline_ns is not None:
            self._deadlines.push(name, deadline_ns)

    def leave(self, name: str) -> T | None:
        """Stop waiting under this name; None where nobody does."""
        found = self._waiting.pop(name, None)
        if found is None:
            return None
        self._turns.discard(name)
        self._deadlines.discard(name)
        self._rest()
        return found.item

    def pop(self, now_ns: int) -> T | None:
        """Let out whose turn it is; None where nobody waits whose deadline has not passed."""
        while (name := self._turns.first) is not None:
            deadline_ns = self._waiting[name].deadline_ns
            if deadline_ns is None or now_ns < deadline_ns:
                return self.leave(name)
            self._turns.discard(name)  # `expire` finds it by its deadline
        return None

    def expire(self, now_ns: int) -> list[T]:
        """Let out all whose deadline has passed, the longest past first."""
        found = []
        while (name := self._deadlines.first) is not None and self._deadlines.key_of(name) <= now_ns:
            self._deadlines.discard(name)
            self._turns.discard(name)
            found.append(self._waiting.pop(name).item)
        self._rest()
        return found

    @property
    def next_deadline_ns(self) -> int | None:
        """Tell when `expire` will have somebody next; None: nobody has a deadline."""
        name = self._deadlines.first
        return None if name is None else self._deadlines.key_of(name)

    def completed(self, now_ns: int) -> None:
        """Note that a placed request is over: the pace is learnt from these."""
        self._pace.completed(now_ns)
        self._rest()

    def retry_after_s(self, now_ns: int) -> float:
        """Estimate when half of those who wait now will have their place, between MIN_RETRY_S and
        MAX_RETRY_S."""
        num_places = max(1, (len(self._waiting) + 1) // 2)
        seconds = num_places * self._pace.gap_ns(now_ns) / NS_PER_S
        return min(max(MIN_RETRY_S, seconds), MAX_RETRY_S)

    def overloaded(self, now_ns: int, reason: str | None = None) -> Overloaded:
        """Make the error that says when to come again; by default because the room is full."""
        return Overloaded(reason or f"{len(self._waiting)} requests wait already", self.retry_after_s(now_ns))

    def _rest(self) -> None:
        if not self._waiting:
            self._pace.rest()


class Pace:
    """Measures completions while others wait: the mean of the last NUM_GAPS gaps. An open gap counts once it
    is longer than that mean: a server that stands still is slow. Time in which nobody waits belongs to no
    gap."""

    def __init__(self) -> None:
        self._gaps_ns: deque[int] = deque(maxlen=NUM_GAPS)
        # last completion, or when somebody began to wait; None: nobody waits
        self._since_ns: int | None = None

    def begin_wait(self, now_ns: int) -> None:
        if self._since_ns is None:
            self._since_ns = now_ns

    def rest(self) -> None:
        self._since_ns = None

    def completed(self, now_ns: int) -> None:
        if self._since_ns is not None:
            self._gaps_ns.append(max(0, now_ns - self._since_ns))
            self._since_ns = now_ns

    def gap_ns(self, now_ns: int) -> float:
        """Estimate nanoseconds between completions; 0.0 where nothing is known."""
        closed_ns = sum(self._gaps_ns)
        mean_ns = closed_ns / len(self._gaps_ns) if self._gaps_ns else 0.0
        open_ns = 0 if self._since_ns is None else max(0, now_ns - self._since_ns)
        return max(mean_ns, (closed_ns + open_ns) / (len(self._gaps_ns) + 1))
