"""Who waits for room in a wire cache, to read into it or to be pushed into it: first come first served, by
producer engine. All ranks hear of requests in one order, so that none waits for another in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayk.transfer.link import ProducerLink
from rayk.transfer.ticket import TransferTicket

BlockTables = Sequence[Sequence[int]]
FOREVER_NS = 1 << 62


@dataclass(eq=False)
class Queued:
    """A request whose transfer has not begun, or that is to be pushed."""

    key: str
    """Its id, or that of its reservation."""
    num_tokens: int
    block_tables: BlockTables
    """Tables of the rank's own blocks."""
    deadline_ns: int
    link: ProducerLink
    ticket: TransferTicket | None = None
    """None: it is to be pushed."""
    failure: str | None = None
    """Why it never will."""
    first_row: int = 0
    """Rows before it need not move."""
    wire_tables: BlockTables = ()
    """Its blocks of the wire cache, when it has room."""


@dataclass(eq=False)
class WireQueue:
    _queued: list[Queued] = field(default_factory=list)

    def __contains__(self, key: object) -> bool:
        return any(q.key == key for q in self._queued)

    def add(self, queued: Queued) -> None:
        """A request comes."""
        self._queued.append(queued)

    def drop(self, key: str) -> None:
        """Nobody wants it any more; `ready` does not name it."""
        self._queued = [q for q in self._queued if q.key != key]

    def fail(self, reason: str, *, key: str | None = None, link: ProducerLink | None = None) -> None:
        """Give up a request, or all of a link; see `ready`."""
        for queued in self._queued:
            if queued.key == key or queued.link is link:
                queued.failure = queued.failure or reason

    def ready(self, now_ns: int) -> list[Queued]:
        """Return those that wait no longer: they have room, or a failure."""
        ready: list[Queued] = []
        full: set[str] = set()
        for queued in self._queued:
            wire, num_tokens = queued.link.wire, queued.num_tokens
            assert wire is not None, "nothing is converted"
            queued.failure = queued.failure or wire.refusal(num_tokens)
            if queued.failure is None and now_ns >= queued.deadline_ns:
                queued.failure = "deadline passed while waiting for room in the wire cache"
            if queued.failure is None:
                # Who came first has it first, also where there is room for a smaller one.
                tables = wire.take(num_tokens) if queued.link.engine not in full else None
                if tables is None:
                    full.add(queued.link.engine)
                    continue
                queued.wire_tables = tables
            ready.append(queued)
        self._queued = [q for q in self._queued if q not in ready]
        return ready
