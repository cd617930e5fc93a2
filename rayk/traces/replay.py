"""When recorded requests are due: those outside sessions, and each session's first, at their time (an open
load); a session's next turn only behind its last answer (a closed loop), as agents and people ask."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """What a replay needs to know of a request: a Recorded, or what was made of one."""

    @property
    def at_ns(self) -> int | None:
        """Earliest time; None: whenever the session's turn has come."""
        ...

    @property
    def session(self) -> str | None: ...

    @property
    def delay_ns(self) -> int: ...


T = TypeVar("T", bound=Timed)


@dataclass(slots=True)
class _Turns(Generic[T]):
    ended_ns: int | None = None  # of the last answer; None while a turn is due or under way
    waiting: deque[tuple[int, T]] = field(default_factory=deque)


class Replay(Generic[T]):
    """Hands out requests in order of when they are due, numbered as they were given; pure, time is passed in.

    `rows` are pulled as late as order allows, so that of a stream of a million only sessions are held. They
    are in the order that `read_trace` makes and `stream_trace` sees to: no turn stands behind a request that
    may be due after it. However a turn ends, the next one follows: prompts do not depend on answers.
    """

    def __init__(self, rows: Iterable[T]) -> None:
        self._rows = enumerate(rows)
        self._due: list[tuple[int, int, T]] = []  # a heap by time, then number
        self._sessions: dict[str, _Turns[T]] = {}
        self._turns: dict[int, str] = {}  # number of a turn that was handed out -> its session
        self._ahead: int | None = None  # number of the last one pulled that waits for no answer, while due
        self._num_waiting = 0
        self._pull()

    def next_due_ns(self) -> int | None:
        """Return when the next one is due; None where all that are left wait for answers, or none is left."""
        return self._due[0][0] if self._due else None

    @property
    def is_waiting(self) -> bool:
        """Tell whether answers will make further turns due, as far as rows have been pulled."""
        return self._num_waiting > 0

    def take(self) -> tuple[int, int, T]:
        """Take the next one: when it is due, its number, itself. Only where `next_due_ns` is not None."""
        due_ns, number, row = heapq.heappop(self._due)
        if row.session is not None:
            self._turns[number] = row.session
        if number == self._ahead:
            self._pull()
        return due_ns, number, row

    def ended(self, number: int, now_ns: int) -> None:
        """Note that the answer to `number` is complete, or has failed: its session's next turn may follow."""
        name = self._turns.pop(number, None)
        if name is None:
            return
        session = self._sessions[name]
        if session.waiting:
            self._num_waiting -= 1
            self._follow(now_ns, *session.waiting.popleft())
        else:
            session.ended_ns = now_ns

    def _pull(self) -> None:
        """Pull rows up to the next one that waits for no answer."""
        self._ahead = None
        for number, row in self._rows:
            session = None if row.session is None else self._sessions.get(row.session)
            if session is None:
                if row.session is not None:
                    self._sessions[row.session] = _Turns()
                heapq.heappush(self._due, (row.at_ns or 0, number, row))
                self._ahead = number
                return
            if session.ended_ns is None:
                session.waiting.append((number, row))
                self._num_waiting += 1
            else:
                self._follow(session.ended_ns, number, row)
                session.ended_ns = None

    def _follow(self, ended_ns: int, number: int, row: T) -> None:
        heapq.heappush(self._due, (max(ended_ns + row.delay_ns, row.at_ns or 0), number, row))
