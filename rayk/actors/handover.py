"""Rank 0's side of moving a request from a prefill engine to a decode engine. All on the loop's thread.

Producer: a request that sampled its first token leaves the scheduler, its blocks go to a lease, all ranks
digest them, and the ticket goes out. The lease ends when every rank was told so, or at its deadline.
Consumer: blocks are reserved for a ticket as soon as there are any, all ranks read, and the request is
scheduled when every rank's digests agree. Nothing is decoded from KV that was not verified.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rayk.actors.commands import BlockTables, Capture, MakeTicket, ReleaseMismatch, StartRead, TicketPart
from rayk.engine.leader import RequestEvent
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import DeadlineExceeded, KVMismatch, RaykError

if TYPE_CHECKING:
    from rayk.actors.extension import RankNews
    from rayk.engine.leader import Leader, Sink
    from rayk.sched.batching import RequestState
    from rayk.transfer.consumer import TransferOutcome
    from rayk.types.request import Request


HOLD_S = 60.0
"""After a mismatch the blocks are kept this long for somebody to look into it."""


@dataclass(slots=True)
class _Incoming:
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


class TransferHandover:
    """Implements engine.leader.Handover for both roles; an aggregated engine only captures."""

    def __init__(self, *, engine: str, epoch: int, tp: int) -> None:
        self._engine = engine
        self._epoch = epoch
        self._tp = tp
        self._leader: Leader | None = None
        self._hand_over: set[str] = set()
        self._capture: set[str] = set()
        self._commands: list[object] = []
        self._sent: list[object] = []
        self._lease_numbers = itertools.count()
        self._lease_ids: dict[str, str] = {}
        """Request id -> its open lease."""
        self._leases: dict[str, set[int]] = {}
        """Lease id -> ranks that were told it is over."""
        self._queued: deque[_Incoming] = deque()
        self._reading: dict[str, _Incoming] = {}
        self._draining: dict[str, _Incoming] = {}
        """Failed, with reads still in flight."""
        self._held: dict[str, int] = {}
        """Mismatches to be looked into -> until when (ns)."""
        self.num_expired_leases = 0

    # Any thread.

    def submit(self, request: Request, sink: Sink, *, hand_over: bool, capture: bool = False) -> None:
        """Run a request here; `hand_over`: only its prefill, ending in a ticket. `capture`: also emit a
        copy of its KV rows as info["captured"] when prefill is done."""

        def start() -> None:
            if not self.leader.open(request, sink, max_tokens=1 if hand_over else None):
                return
            if hand_over:
                self._hand_over.add(request.request_id)
            if capture:
                self._capture.add(request.request_id)
            self.leader.start(request)

        self.leader.prepare(request)
        self.leader.post(start)

    def submit_decode(
        self,
        request: Request,
        ticket: TransferTicket,
        output_token_ids: tuple[int, ...],
        transfer_s: float,
        sink: Sink,
        *,
        reserve_s: float | None = None,
    ) -> None:
        """Fetch a request's KV and go on decoding after `output_token_ids`.

        It may wait `reserve_s` for blocks (by default as long as for the transfer itself). A request that
        draws tokens carries the seed it was prefilled with.
        """
        sampling = request.sampling
        assert not sampling.temperature or sampling.seed is not None, "another seed would draw other tokens"
        now = time.monotonic_ns()

        def start() -> None:
            if self.leader.open(request, sink, prefilled=True):
                wait_s = transfer_s if reserve_s is None else reserve_s
                self._queued.append(_Incoming(request, ticket, output_token_ids, transfer_s, wait_s, now))

        self.leader.prepare(request)
        self.leader.post(start)

    def settle(self, request_id: str) -> None:
        """A failed request was looked into: its blocks here and its lease there may go."""

        def free() -> None:
            self._let_go(request_id)
            self._end_lease(self._lease_ids.get(request_id))

        self.leader.post(free)

    # The loop's thread: engine.leader.Handover.

    def attach(self, leader: Leader) -> None:
        """Called once by the leader."""
        assert self._leader is None, "attached twice"
        self._leader = leader

    @property
    def leader(self) -> Leader:
        """The leader this belongs to."""
        assert self._leader is not None
        return self._leader

    def takes(self, state: RequestState) -> bool:
        """Prefill-only requests leave with their first token; captures are asked for."""
        request_id = state.request_id
        hand_over, capture = request_id in self._hand_over, request_id in self._capture
        if not hand_over and not capture:
            return False
        self._hand_over.discard(request_id)
        self._capture.discard(request_id)
        if state.finish_reason is not None:
            return False
        tables = self.leader.manager.block_tables(request_id)
        if capture:
            self._commands.append(Capture(request_id, state.num_computed, tables))
        if hand_over:
            self._lend(request_id, state.num_computed, tables)
        return hand_over

    def commands(self) -> tuple[object, ...]:
        """Tickets to write, reads to start, rows to copy."""
        now = time.monotonic_ns()
        for request_id in [r for r, until in self._held.items() if until <= now]:
            self._let_go(request_id)
        self._give_up_late(now)
        self._reserve(now)
        self._sent, self._commands = self._commands, []
        return tuple(self._sent)

    def needs_gather(self) -> bool:
        """While a lease or a read is open, every rank's news counts."""
        return bool(
            self._leases or self._reading or self._draining or self._queued or self._commands or self._held
        )

    def absorb(self, results: tuple[tuple[object, ...], ...], polls: tuple[Any, ...]) -> None:
        """Command results in the order sent, then each rank's news."""
        for index, command in enumerate(self._sent):
            self._on_result(command, [per_rank[index] for per_rank in results])
        self._sent = []
        for rank, news in enumerate(polls):
            if news is not None:
                self._on_news(rank, news)

    def abort(self, request_id: str) -> bool:
        """A read in flight cannot be recalled: its blocks are freed when all ranks are done with it."""
        self._hand_over.discard(request_id)
        self._capture.discard(request_id)
        incoming = self._reading.get(request_id)
        if incoming is not None:
            incoming.aborted = True
            return True
        for queued in self._queued:
            if queued.request.request_id == request_id:
                self._queued.remove(queued)
                return True
        if request_id in self._lease_ids:
            # Should a reader be at it now, the generations will tell it.
            self._end_lease(self._lease_ids[request_id])
            return True
        return False

    def holds(self, request_id: str) -> bool:
        """Whether blocks or reads of a request outlive its stream here."""
        return any(
            request_id in here for here in (self._lease_ids, self._reading, self._draining, self._held)
        )

    def fail_all(self, error: RaykError) -> None:
        """The engine is going down: nothing here outlives it."""
        del error
        self._leases.clear()
        self._lease_ids.clear()
        self._queued.clear()
        self._reading.clear()
        self._draining.clear()
        self._held.clear()

    # Producer.

    def _lend(self, request_id: str, num_tokens: int, tables: BlockTables) -> None:
        # Numbered: a request that comes again gets another lease, whatever late news of the first.
        lease_id = f"{self._engine}/{self._epoch}/{next(self._lease_numbers)}/{request_id}"
        self._lease_ids[request_id] = lease_id
        self.leader.scheduler.remove(request_id, keep_blocks=True)
        self.leader.manager.lease(request_id, lease_id)
        self._leases[lease_id] = set()
        self._commands.append(MakeTicket(request_id, lease_id, num_tokens, tables))

    def _on_ticket(self, command: MakeTicket, answers: list[TicketPart]) -> None:
        generations = answers[0].generations
        assert all(a.generations == generations for a in answers), "ranks disagree on generations"
        ticket = TransferTicket(
            request_id=command.request_id,
            lease_id=command.lease_id,
            engine=self._engine,
            epoch=self._epoch,
            num_tokens=command.num_tokens,
            block_tables=command.block_tables,
            generations=generations,
            digests=np.stack([a.digests for a in answers]),
        )
        self.leader.emit(RequestEvent(request_id=command.request_id, payload=ticket))

    def _end_lease(self, lease_id: str | None) -> None:
        if lease_id is not None and self._leases.pop(lease_id, None) is not None:
            self._lease_ids = {r: i for r, i in self._lease_ids.items() if i != lease_id}
            self.leader.manager.release(lease_id)

    # Consumer.

    def _give_up_late(self, now: int) -> None:
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

    def _on_result(self, command: object, answers: list[Any]) -> None:
        error = next((a for a in answers if isinstance(a, RaykError)), None)
        match command:
            case MakeTicket() if error is not None:
                self._end_lease(command.lease_id)
                self.leader.emit(RequestEvent(request_id=command.request_id, error=error))
            case MakeTicket():
                self._on_ticket(command, answers)
            case Capture() if error is not None:
                # Its blocks, or its lease, go at the next turn: before a request that takes its id comes.
                self.leader.abort(command.request_id)
                self.leader.emit(RequestEvent(request_id=command.request_id, error=error))
            case Capture():
                # By rank; the layers' rows of each.
                self.leader.emit(RequestEvent(request_id=command.request_id, info={"captured": answers}))

    def _on_news(self, rank: int, news: RankNews) -> None:
        for lease_id in news.released:
            told = self._leases.get(lease_id, set())
            told.add(rank)
            if len(told) == self._tp:
                self._end_lease(lease_id)
        for lease_id in news.expired:
            if lease_id in self._leases:
                self.num_expired_leases += 1
                self._end_lease(lease_id)
        for outcome in news.outcomes:
            self._on_outcome(rank, outcome)
        for lease_id in news.drained:
            for incoming in (*self._reading.values(), *self._draining.values()):
                if incoming.ticket.lease_id == lease_id:
                    incoming.drained.add(rank)
                    self._free(incoming.request.request_id)

    def _on_outcome(self, rank: int, outcome: TransferOutcome) -> None:
        incoming = self._reading.get(outcome.request_id)
        if incoming is not None:
            incoming.outcomes[rank] = outcome
            if len(incoming.outcomes) == self._tp:
                self._finish_read(incoming)

    def _finish_read(self, incoming: _Incoming) -> None:
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
            self._let_go(request_id)
        self._free(request_id)
        self.leader.emit(RequestEvent(request_id=request_id, error=error, info=info))

    def _let_go(self, request_id: str) -> None:
        """Nobody looks into this mismatch (any more)."""
        if self._held.pop(request_id, None) is not None:
            self._commands.append(ReleaseMismatch(request_id))
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        """Give a failed request's blocks back, once nothing writes to them and nobody looks at them."""
        incoming = self._draining.get(request_id)
        if incoming is not None and len(incoming.drained) == self._tp and request_id not in self._held:
            del self._draining[request_id]
            self.leader.manager.free(request_id)


def _slowest(outcomes: list[TransferOutcome]) -> dict[str, int]:
    """Each stage as long as its slowest rank took."""
    names = {name for o in outcomes for name in o.stage_ns}
    return {name: max(o.stage_ns.get(name, 0) for o in outcomes) for name in sorted(names)}
