"""Consumer's half of a hand-over, on rank 0: blocks for requests that come, reads on all ranks, verdicts.

All on the loop's thread. Blocks are reserved for a ticket as soon as there are any, all ranks read, and the
request is scheduled when every rank's digests agree. Nothing is decoded from KV that was not verified.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayk.actors.commands import ReleaseMismatch, StartRead
from rayk.engine.leader import RequestEvent
from rayk.types.errors import DeadlineExceeded, KVMismatch

if TYPE_CHECKING:
    from rayk.actors.extension import RankNews
    from rayk.engine.leader import Leader
    from rayk.transfer.consumer import TransferOutcome
    from rayk.transfer.ticket import TransferTicket
    from rayk.types.request import Request

HOLD_S = 60.0
"""After a mismatch the blocks are kept this long for somebody to look into it."""


@dataclass(slots=True)
class Incoming:
    """A request whose KV is on its way here."""

    request: Request
    ticket: TransferTicket
    output_token_ids: tuple[int, ...]
    transfer_s: float
    reserve_s: float
    submitted_ns: int
    started_ns: int | None = None
    outcomes: dict[int, TransferOutcome] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    """Ranks whose reads ended after their failed outcome."""
    aborted: bool = False


class Receiving:
    """Requests on their way to one engine. `leader` is set when the hand-over is attached."""

    def __init__(self, *, tp: int, commands: list[object]) -> None:
        """`commands`: what all ranks are to do at the next turn; appended to."""
        self._tp = tp
        self._commands = commands
        self.leader: Leader | None = None
        self._queued: deque[Incoming] = deque()
        self._reading: dict[str, Incoming] = {}
        self._draining: dict[str, Incoming] = {}
        """Failed, with reads still in flight."""
        self._held: dict[str, int] = {}
        """Mismatches to be looked into -> until when (ns)."""

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way, drains or is kept."""
        return bool(self._reading or self._draining or self._queued or self._held)

    def holds(self, request_id: str) -> bool:
        """Whether blocks or reads of a request are here."""
        return any(request_id in here for here in (self._reading, self._draining, self._held))

    def queue(self, incoming: Incoming) -> None:
        """A request waits for blocks."""
        self._queued.append(incoming)

    def turn(self) -> None:
        """Before each turn: forget what is kept too long, give up who waited too long, start reads."""
        now = time.monotonic_ns()
        for request_id in [r for r, until in self._held.items() if until <= now]:
            self.let_go(request_id)
        self._give_up_late(now)
        self._reserve(now)

    def abort(self, request_id: str) -> bool:
        """A read in flight cannot be recalled: its blocks are freed when all ranks are done with it. False
        where nothing of the request is on its way."""
        incoming = self._reading.get(request_id)
        if incoming is not None:
            incoming.aborted = True
            return True
        for queued in self._queued:
            if queued.request.request_id == request_id:
                self._queued.remove(queued)
                return True
        return False

    def on_news(self, rank: int, news: RankNews) -> None:
        """Take a rank's outcomes, and what has drained there."""
        for outcome in news.outcomes:
            self._on_outcome(rank, outcome)
        for lease_id in news.drained:
            for incoming in (*self._reading.values(), *self._draining.values()):
                if incoming.ticket.lease_id == lease_id:
                    incoming.drained.add(rank)
                    self._free(incoming.request.request_id)

    def let_go(self, request_id: str) -> None:
        """Nobody looks into this mismatch (any more)."""
        if self._held.pop(request_id, None) is not None:
            self._commands.append(ReleaseMismatch(request_id))
            self._free(request_id)

    def clear(self) -> None:
        """The engine is going down."""
        self._queued.clear()
        self._reading.clear()
        self._draining.clear()
        self._held.clear()

    def _give_up_late(self, now: int) -> None:
        assert self.leader is not None
        late = [q for q in self._queued if now - q.submitted_ns > q.reserve_s * 1e9]
        for incoming in late:
            self._queued.remove(incoming)
            request_id = incoming.request.request_id
            error = DeadlineExceeded(f"waiting for KV blocks for {request_id}", incoming.reserve_s)
            self.leader.emit(RequestEvent(request_id=request_id, error=error))

    def _reserve(self, now: int) -> None:
        """Start the reads that blocks allow, first come first served.

        Requests that are here already have come first: not while one of them lacks blocks, and each keeps
        a block per group to go on with.
        """
        assert self.leader is not None
        scheduler, manager = self.leader.scheduler, self.leader.manager
        while self._queued and not scheduler.is_short_of_blocks:
            incoming = self._queued[0]
            request_id = incoming.request.request_id
            updates = manager.reserve_live(request_id, incoming.ticket.num_tokens)
            if updates is None:
                return
            num_here = scheduler.num_running + scheduler.num_waiting
            if manager.pool.num_free_blocks < num_here * len(manager.groups):
                manager.free(request_id)
                return
            self._queued.popleft()
            incoming.started_ns = now
            self._reading[request_id] = incoming
            tables = tuple(ids for _, ids in updates)
            self._commands.append(StartRead(incoming.ticket, tables, incoming.transfer_s))

    def _on_outcome(self, rank: int, outcome: TransferOutcome) -> None:
        incoming = self._reading.get(outcome.request_id)
        if incoming is not None:
            incoming.outcomes[rank] = outcome
            if len(incoming.outcomes) == self._tp:
                self._finish_read(incoming)

    def _finish_read(self, incoming: Incoming) -> None:
        assert self.leader is not None
        request_id = incoming.request.request_id
        del self._reading[request_id]
        outcomes = [incoming.outcomes[rank] for rank in range(self._tp)]
        error = next((o.error for o in outcomes if o.error is not None), None)
        assert incoming.started_ns is not None
        info: dict[str, Any] = {
            "transfers": [row for o in outcomes for row in o.rows],
            "stage_ns": {"reserve": incoming.started_ns - incoming.submitted_ns, **_slowest(outcomes)},
            "num_kv_bytes_checked": sum(o.num_bytes_checked for o in outcomes),
        }
        if error is None and not incoming.aborted:
            self.leader.start(incoming.request, incoming.output_token_ids)
            self.leader.emit(RequestEvent(request_id=request_id, info=info))
            return
        incoming.drained |= {rank for rank, o in enumerate(outcomes) if not o.is_draining}
        self._draining[request_id] = incoming
        mismatch = next((o.error for o in outcomes if isinstance(o.error, KVMismatch)), None)
        if mismatch is not None:
            # The blocks stay as they are until somebody has looked into it (`settle`).
            self._held[request_id] = time.monotonic_ns() + int(HOLD_S * 1e9)
            error = mismatch
        if incoming.aborted:
            self.let_go(request_id)
        self._free(request_id)
        self.leader.emit(RequestEvent(request_id=request_id, error=error, info=info))

    def _free(self, request_id: str) -> None:
        """Give a failed request's blocks back, once nothing writes to them and nobody looks at them."""
        incoming = self._draining.get(request_id)
        if incoming is not None and len(incoming.drained) == self._tp and request_id not in self._held:
            assert self.leader is not None
            del self._draining[request_id]
            self.leader.manager.free(request_id)


def _slowest(outcomes: list[TransferOutcome]) -> dict[str, int]:
    """Each stage as long as its slowest rank took."""
    names = {name for o in outcomes for name in o.stage_ns}
    return {name: max(o.stage_ns.get(name, 0) for o in outcomes) for name in sorted(names)}
