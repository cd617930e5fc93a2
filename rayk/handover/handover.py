"""Rank 0's side of moving a request from a prefill engine to a decode engine. All on the loop's thread.

`lending` is the producer's half and `receiving` the consumer's; here requests come in, commands go out to all
ranks, and their results and news come back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import (
    Capture,
    EndPush,
    HoldTicket,
    Inspect,
    Inspected,
    LetGo,
    MakeStore,
    MakeTicket,
    Prove,
    Reserve,
)
from rayk.handover.joined import join_ranks
from rayk.handover.lending import Lending
from rayk.handover.offloading import Offloading
from rayk.handover.pushing import Pushing
from rayk.handover.receiving import Incoming, Receiving
from rayk.handover.reservations import ReservationRequest, Reservations
from rayk.transfer.peer_data import wrong_head
from rayk.transfer.ticket_seal import is_whole
from rayk.types.errors import NotFiniteError, RaykError, TransferError

if TYPE_CHECKING:
    from rayk.engine.leader import Leader, Sink
    from rayk.parallel.shard import EngineShape
    from rayk.sched.request_state import RequestState
    from rayk.transfer.ticket import Reservation, TransferTicket
    from rayk.types.batch import ScheduledBatch
    from rayk.types.offload import OffloadSettings
    from rayk.types.request import Request


class TransferHandover:
    """Implements engine.leader.Handover for both roles; an aggregated engine only captures."""

    def __init__(
        self, *, engine: str, epoch: int, shape: EngineShape, offload: OffloadSettings | None = None
    ) -> None:
        """`shape`: of the engine. `offload`: how it uses a host tier, once one is attached."""
        self._shape, num_ranks = shape, shape.num_ranks
        self._leader: Leader | None = None
        self._hand_over: dict[str, bool] = {}
        """Requests that leave with a ticket -> whether a host tier is to read it."""
        self._capture: set[str] = set()
        self._commands: list[object] = []
        self._sent: list[object] = []
        self._engine = engine
        self._not_finite: dict[str, NotFiniteError] = {}
        """Errors of requests that are being looked into."""
        self._leaving: dict[str, RequestState] = {}
        """Requests whose tickets are being written."""
        self.lending = Lending(engine=engine, epoch=epoch, num_ranks=num_ranks)
        self.receiving = Receiving(num_ranks=num_ranks, commands=self._commands)
        self.pushing = Pushing(self._commands)
        self.reservations = Reservations(
            engine=engine, epoch=epoch, num_ranks=num_ranks, commands=self._commands
        )
        self.offloading: Offloading | None = None
        if offload is not None:
            who = {"engine": engine, "epoch": epoch, "shape": shape}
            parts = {"commands": self._commands, "receiving": self.receiving}
            self.offloading = Offloading(settings=offload, **who, **parts)  # type: ignore[arg-type]

    # Any thread.

    def submit(
        self,
        request: Request,
        sink: Sink,
        *,
        hand_over: bool,
        capture: bool = False,
        via_host: bool = False,
        output_token_ids: tuple[int, ...] = (),
        reservation: Reservation | None = None,
    ) -> None:
        """Run a request here; `hand_over`: only its prefill, ending in a ticket. `capture`: also emit a
        copy of its KV rows as info.captured when prefill is done. `via_host`: a host tier is to read its KV.
        `output_token_ids`: delivered so far, by an engine that is lost. `reservation`: where its KV is pushed
        to while it is prefilled."""
        now = self.leader.clock()

        def start() -> None:
            if reservation is not None and not is_whole(reservation):
                error = TransferError(request.request_id, "its reservation was changed on the way")
                sink(RequestEvent(request_id=request.request_id, error=error))
                return
            if not self.leader.open(request, sink, max_tokens=1 if hand_over else None):
                return
            if reservation is not None:
                self.pushing.begin(request.request_id, reservation)
            if hand_over:
                self._hand_over[request.request_id] = via_host
            if capture:
                self._capture.add(request.request_id)
            known, computed = (output_token_ids, 0) if output_token_ids else (None, None)
            begin = functools.partial(self.leader.start, request, submitted_ns=now)
            start = functools.partial(begin, known, computed)
            # What is pushed is pushed from its first step on; what was delivered is computed once more.
            if (
                self.offloading is None
                or known is not None
                or reservation is not None
                or not self.offloading.look_up(request, start, functools.partial(begin, None))
            ):
                start()

        self.leader.prepare(request)
        self.leader.post(start)

    def submit_reserve(
        self,
        request: Request,
        sink: Sink,
        *,
        producer: str,
        reserve_s: float,
        hold_s: float,
    ) -> None:
        """Reserve blocks here for the KV of a request's prompt, which engine `producer` will push: the sink
        gets a Reservation. It may wait `reserve_s` for blocks; they wait `hold_s` for its ticket."""
        now = self.leader.clock()

        def start() -> None:
            if self.leader.open(request, sink, prefilled=True):
                wanted = ReservationRequest(
                    request_id=request.request_id,
                    token_ids=tuple(request.prompt_token_ids),
                    cache_salt=request.cache_salt,
                    producer=producer,
                    reserve_s=reserve_s,
                    hold_s=hold_s,
                    asked_ns=now,
                    taken_ns=self.leader.clock(),
                )
                self.reservations.ask(wanted)

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
        recompute: bool = False,
    ) -> None:
        """Fetch a request's KV and go on decoding after `output_token_ids`. `recompute`: where that fails, go
        on from what of it arrived and is proven.

        It may wait `reserve_s` for blocks (by default as long as for the transfer itself). A request that
        draws tokens carries the seed it was prefilled with.
        """
        sampling = request.sampling
        assert not sampling.temperature or sampling.seed is not None, "another seed would draw other tokens"
        now = self.leader.clock()

        def start() -> None:
            num_tokens = len(request.prompt_token_ids) + len(output_token_ids)
            wrong = wrong_head(ticket)
            is_of_it = ticket.request_id == request.request_id
            if wrong is None and not (is_of_it and 1 <= ticket.num_tokens <= num_tokens):
                wrong = "its ticket is of other tokens than the request's"
                self._commands += (HoldTicket(ticket), LetGo(ticket.request_id))
            if wrong is not None:
                error = TransferError(request.request_id, wrong)
                sink(RequestEvent(request_id=request.request_id, error=error))
            elif self.leader.open(request, sink, prefilled=True):
                wait_s = transfer_s if reserve_s is None else reserve_s
                incoming = Incoming(request, ticket, output_token_ids, transfer_s, wait_s, now, recompute)
                self._take_in(incoming)

        self.leader.prepare(request)
        self.leader.post(start)

    def settle(self, request_id: str) -> None:
        """A failed request was looked into: its blocks here and its lease there may go."""

        def free() -> None:
            self.receiving.let_go(request_id)
            self.reservations.give_up(request_id)
            self.lending.give_up(request_id)

        self.leader.post(free)

    # The loop's thread: engine.leader.Handover.

    def attach(self, leader: Leader) -> None:
        """Keep the leader, which calls this once."""
        assert self._leader is None, "attached twice"
        self._leader = self.lending.leader = self.receiving.leader = leader
        self.pushing.leader = self.reservations.leader = leader
        if self.offloading is not None:
            self.offloading.attach_leader(leader)
            self.lending.side = self.offloading.side

    @property
    def leader(self) -> Leader:
        """The leader this belongs to."""
        assert self._leader is not None
        return self._leader

    @property
    def num_expired_leases(self) -> int:
        """Leases whose deadline passed."""
        return self.lending.num_expired

    def wants_next(self, request_id: str) -> bool:
        """Tell whether its first token is awaited here, to hand it over or to capture its KV."""
        return request_id in self._hand_over or request_id in self._capture

    def takes(self, state: RequestState) -> bool:
        """Prefill-only requests leave with their first token; captures are asked for."""
        request_id = state.request_id
        hand_over, capture = request_id in self._hand_over, request_id in self._capture
        if not hand_over and not capture:
            return False
        via_host = self._hand_over.pop(request_id, False)
        self._capture.discard(request_id)
        if state.finish_reason is not None:
            self.pushing.end(request_id, "it ended where it was prefilled")
            return False
        tables = self.leader.manager.group_tables(request_id)
        if hand_over and self.offloading is not None:
            self.offloading.storing.left(request_id)
        if capture:
            self._commands.append(Capture(request_id, state.num_computed, tables))
        if hand_over:
            self._leaving[request_id] = state
            ticket = self.lending.lend(request_id, state.num_computed, tables)
            reservation = self.pushing.take(request_id)
            if reservation is not None:
                reservation_id, attempt = reservation.reservation_id, state.num_preemptions
                ticket = replace(ticket, reservation_id=reservation_id, attempt=attempt)
            if via_host:
                self.lending.wait_for_room(ticket)
            else:
                self._commands.append(ticket)
        return hand_over

    def commands(self) -> tuple[object, ...]:
        """List tickets to write, reads to start and rows to copy."""
        self.receiving.turn()
        self.reservations.turn()
        self._commands += self.lending.turn()
        if self.offloading is not None:
            self.offloading.turn()
        self._sent = self._commands[:]
        self._commands.clear()  # the list itself is shared
        return tuple(self._sent)

    def step_commands(self, batch: ScheduledBatch) -> tuple[object, ...]:
        """Return what of the step is pushed."""
        if self.offloading is not None:
            self.offloading.stepping(batch)
        return self.pushing.step_commands(batch)

    @property
    def has_commands(self) -> bool:
        """Whether the ranks are to do something, such as to write a ticket: it is not to wait for a poll."""
        return bool(self._commands)

    def needs_gather(self) -> bool:
        """While a lease, a reservation or a read is open, every rank's news counts."""
        is_moving = self.lending.is_open or self.receiving.is_busy or self.reservations.is_busy
        is_moving = is_moving or (self.offloading is not None and self.offloading.is_busy)
        return is_moving or self.has_commands

    @property
    def is_quiet(self) -> bool:
        """Whether turns do nothing here until a rank has news, somebody asks, a block comes free, or it is
        time for `receiving.give_up_ns`. Reads may be under way. For a simulation."""
        is_lender = self.lending.is_open or self.reservations.is_busy or self.offloading is not None
        return not (is_lender or self._commands or self.receiving.any_waiting)

    def absorb(self, results: tuple[tuple[object, ...], ...], polls: tuple[Any, ...]) -> None:
        """Command results in the order sent, then each rank's news."""
        for index, command in enumerate(self._sent):
            self._on_result(command, [per_rank[index] for per_rank in results])
        self._sent = []
        for rank, news in enumerate(polls):
            if news is not None:
                self.lending.on_news(rank, news)
                self.receiving.on_news(rank, news)
                self.reservations.on_news(rank, news)
                if self.offloading is not None:
                    self.offloading.storing.on_news(rank, news)

    def inspect(self, error: NotFiniteError, num_tokens: int) -> None:
        """All ranks look for where it began; its blocks are under a lease until then."""
        request_id, lease_id = error.request_id, f"{error.request_id}/not finite"
        self._hand_over.pop(request_id, None)
        self._capture.discard(request_id)
        self.pushing.end(request_id, "its logits are not finite")
        tables = self.leader.manager.group_tables(request_id)
        self.leader.manager.lease(request_id, lease_id)
        self._look_into(error, Inspect(request_id, lease_id, num_tokens, tables))

    def _look_into(self, error: NotFiniteError, command: Inspect) -> None:
        self._not_finite[command.request_id] = error
        if self.offloading is not None:
            self.offloading.storing.drop(command.request_id)
        self._commands.append(command)

    def _on_ticket(self, command: MakeTicket, answers: list[Any], error: RaykError | None) -> None:
        state = self._leaving.pop(command.request_id, None)
        if not isinstance(error, NotFiniteError) or state is None:
            self.lending.on_ticket(command, answers, error)
            return
        self.leader.forget(state)
        if command.reservation_id is not None:
            self._commands.append(EndPush(command.reservation_id, "its KV is not finite"))
        what = command.request_id, command.lease_id, command.num_tokens, command.block_tables
        self._look_into(error, Inspect(*what))

    def _on_inspected(self, command: Inspect, answers: list[Any]) -> None:
        self.lending.end(command.lease_id)
        self.leader.manager.release(command.lease_id)
        error = self._not_finite.pop(command.request_id)
        found = [a for a in answers if isinstance(a, Inspected)]
        places = [a.kv for a in found if a.kv is not None]
        error.engine = self._engine
        error.kv = str(min(places)) if places else ""
        weights = tuple(dict.fromkeys(w for a in found for w in a.weights or ()))
        if weights or (len(found) == len(answers) and all(a.weights is not None for a in found)):
            error.weights = weights
        self.leader.emit(RequestEvent(request_id=command.request_id, error=error))

    def abort(self, request_id: str) -> bool:
        """Stop what there is of a request; False if there is nothing."""
        self._hand_over.pop(request_id, None)
        self._capture.discard(request_id)
        self.pushing.end(request_id, "it was aborted where it was prefilled")
        if self.offloading is not None and self.offloading.abort(request_id):
            return True
        halves = self.receiving.abort, self.reservations.give_up, self.lending.give_up
        return any(abort(request_id) for abort in halves)

    @property
    def num_awaited(self) -> int:
        """Requests whose KV is awaited here."""
        return self.receiving.num_awaited

    def holds(self, request_id: str) -> bool:
        """Tell whether blocks or reads of a request outlive its stream here."""
        has_blocks = self.lending.holds(request_id) or self.receiving.holds(request_id)
        has_blocks = has_blocks or request_id in self._not_finite
        return has_blocks or (self.offloading is not None and self.offloading.holds(request_id))

    def holders(self, block_ids: Sequence[int]) -> dict[int, str]:
        """Block -> the request that holds it now, here or by a lease; free ones are absent."""
        holders = self.leader.manager.holders(block_ids)
        return {block: self.lending.request_of(holder) or holder for block, holder in holders.items()}

    def fail_all(self, error: RaykError) -> None:
        """The engine is going down: nothing here outlives it."""
        del error
        self.lending.clear()
        self.receiving.clear()
        self.pushing.clear()
        self.reservations.clear()
        self._not_finite.clear()
        self._leaving.clear()
        if self.offloading is not None:
            self.offloading.clear()

    def _take_in(self, incoming: Incoming) -> None:
        """A request's ticket is here: it is pushed into blocks that it has, or waits for some."""
        request_id, ticket = incoming.request.request_id, incoming.ticket
        incoming.taken_ns = self.leader.clock()
        if ticket.reservation_id is None:
            self.receiving.queue(incoming)
            return
        claimed = self.reservations.claim(request_id, ticket.reservation_id)
        if claimed is not None:
            self.receiving.begin(incoming, *claimed)
            return
        self.reservations.give_up(request_id)
        error = TransferError(request_id, "the blocks that it was pushed into were given up")
        self.leader.emit(RequestEvent(request_id=request_id, error=error))

    def _on_result(self, command: object, answers: list[Any]) -> None:
        error = next((a for a in answers if isinstance(a, RaykError)), None)
        match command:
            case Reserve():
                self.reservations.on_refused(command, error)
            case MakeTicket():
                self._on_ticket(command, answers, error)
            case MakeStore():
                assert self.offloading is not None
                self.offloading.storing.on_refused(command, error)
            case Inspect():
                self._on_inspected(command, answers)
            case Prove():
                self.receiving.on_proof(command, answers)
            case Capture() if error is not None:
                # Its blocks, or its lease, go at the next turn: before a request that takes its id comes.
                self.leader.abort(command.request_id)
                self.leader.emit(RequestEvent(request_id=command.request_id, error=error))
            case Capture():
                rows = join_ranks(answers, self.leader.manager.groups, self._shape, command.num_tokens)
                self.leader.emit(RequestEvent(request_id=command.request_id, info=EventInfo(captured=rows)))
