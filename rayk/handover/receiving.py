"""Consumer's half of a hand-over, on rank 0: blocks for requests that come, reads on all ranks, verdicts.

All on the loop's thread. Blocks are reserved for a ticket as soon as there are any, all ranks read, and the
request is scheduled when every rank's digests agree. Nothing is decoded from KV that was not verified.

What the engine's prefix cache has of the prompt is not read: its blocks stand in the request's tables.

A request that may be recomputed goes on here when its transfer failed: once nothing of it is in flight, all
ranks prove what arrived all the same, and the prompt is computed from the longest prefix that this leaves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.arrival_times import arrival_stages
from rayk.handover.commands import BlockTables, HoldTicket, LetGo, Prove, ReleaseMismatch, StartRead
from rayk.handover.rank_answers import RankAnswers
from rayk.handover.reservations import may_reserve, reserve_blocks
from rayk.kv.manager import LocalPrefix
from rayk.transfer.handshake import row_group_blocks
from rayk.transfer.valid_prefix import longest_valid_prefix
from rayk.types.errors import DeadlineExceeded, KVMismatch, RaykError, TransferError
from rayk.types.verdicts import verdict_of

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.handover.commands import RankNews
    from rayk.transfer.consumer import TransferOutcome
    from rayk.transfer.ticket import TransferTicket
    from rayk.types.request import Request

HOLD_S = 60.0
"""How long blocks are kept after a mismatch, for somebody to look into it."""
IN_FLIGHT = "reads in flight of "
"""How a lease is named that holds blocks for reads which do not end."""
NO_PREFIX = LocalPrefix(0, ())
DRAIN_S = 2.0
"""A request to be recomputed waits this long for reads in flight; then it leaves its blocks to them."""


Arrived = Callable[[int, "RaykError | None", dict[str, Any]], None]
"""(first tokens whose KV is in the request's blocks, what failed, what is told of the transfer)."""


@dataclass(slots=True, eq=False)
class Incoming:
    """A request whose KV is on its way here."""

    request: Request
    ticket: TransferTicket
    output_token_ids: tuple[int, ...]
    transfer_s: float
    reserve_s: float
    submitted_ns: int
    recompute: bool = False
    """Whether it goes on here when its transfer fails."""
    taken_ns: int = 0
    """When the engine's loop saw it, between two steps."""
    is_announced: bool = False
    """Whether all ranks know that it waits."""
    started_ns: int | None = None
    block_tables: BlockTables = ()
    local_prefix: LocalPrefix = NO_PREFIX
    """What need not be read."""
    outcomes: RankAnswers[TransferOutcome] = field(init=False)
    drained: RankAnswers[bool] = field(init=False)
    """Ranks whose reads ended after their failed outcome."""
    aborted: bool = False
    failure: RaykError | None = None
    failed_ns: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    """What is told of the transfer."""
    arrived: Arrived | None = None
    """Who goes on with a request that was not handed over: it is told in place of the request's sink, once,
    but for requests that were aborted."""


class Receiving:
    """Requests on their way to one engine. `leader` is set when the hand-over is attached."""

    def __init__(self, *, num_ranks: int, commands: list[object]) -> None:
        """`commands`: what all ranks are to do at the next turn; appended to."""
        self._num_ranks = num_ranks
        self._commands = commands
        self.leader: Leader | None = None
        self.num_received = 0
        """Requests whose KV came, right, to every rank."""
        self.num_failed: Counter[str] = Counter()
        """The others that were begun, each once, by what it stands for: a mismatch at any rank before all."""
        self._queued: deque[Incoming] = deque()
        self._reading: dict[str, Incoming] = {}
        self._draining: dict[str, Incoming] = {}
        """Failed, with reads still in flight."""
        self._kept_until: dict[str, int] = {}
        """Mismatches to be looked into -> until when (ns)."""
        self._proving: dict[str, Incoming] = {}
        """Failed and drained; the ranks say what arrived."""
        self._abandoned: dict[str, Incoming] = {}
        """Lease that holds blocks which reads in flight were left -> whose they were."""
        self._without_drafts: set[str] = set()
        """Engines of whose KV the last that came had no rows of draft layers."""

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way, drains or is kept."""
        under_way = self._reading or self._draining or self._proving
        return bool(under_way or self._queued or self._kept_until or self._abandoned)

    @property
    def any_waiting(self) -> bool:
        """Whether a turn may do something here though no rank has news and no block comes free: at another
        deadline than `give_up_ns`, or because there are blocks."""
        has_blocks = bool(self._queued) and not self._lacks_blocks
        return has_blocks or bool(self._draining or self._kept_until)

    @property
    def give_up_ns(self) -> int | None:
        """The last moment at which nobody in the queue has waited too long; None: nobody waits for blocks."""
        return min((i.submitted_ns + int(i.reserve_s * 1e9) for i in self._queued), default=None)

    @property
    def _lacks_blocks(self) -> bool:
        """Whether the first in the queue asks in vain for blocks until some come free. Where a prefix may be
        found, to ask is not without effect, and this is false."""
        assert self.leader is not None
        manager, head = self.leader.manager, self._queued[0]
        is_new = any(not incoming.is_announced for incoming in self._queued)
        if manager.finds_prefixes or is_new or head.ticket.first_row:
            return False
        return not may_reserve(self.leader, manager.num_live_blocks(head.ticket.num_tokens))

    @property
    def num_awaited(self) -> int:
        """Requests that wait for blocks, or whose KV comes."""
        return len(self._queued) + len(self._reading)

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Failed requests whose blocks are still written to."""
        return tuple(_abandoned_lease(incoming) for incoming in tuple(self._draining.values()))

    def holds(self, request_id: str) -> bool:
        """Tell whether blocks or reads of a request are here."""
        return any(
            request_id in here for here in (self._reading, self._draining, self._kept_until, self._proving)
        )

    def queue(self, incoming: Incoming) -> None:
        """A request waits for blocks."""
        self._queued.append(incoming)

    def begin(
        self, incoming: Incoming, block_tables: BlockTables, local_prefix: LocalPrefix = NO_PREFIX
    ) -> None:
        """A request's KV comes into these blocks, which are its own but for those that are held."""
        assert self.leader is not None
        incoming.started_ns = self.leader.clock()
        incoming.block_tables, incoming.local_prefix = block_tables, local_prefix
        incoming.outcomes, incoming.drained = RankAnswers(self._num_ranks), RankAnswers(self._num_ranks)
        self._reading[incoming.request.request_id] = incoming
        here = frozenset(block for blocks in local_prefix.blocks for block in blocks)
        limits = incoming.transfer_s, local_prefix.num_tokens
        self._commands.append(StartRead(incoming.ticket, block_tables, *limits, here))

    def turn(self) -> None:
        """Called before each turn, it forgets what is kept too long, gives up late requests, starts reads."""
        if not self.is_busy:
            return
        assert self.leader is not None
        now = self.leader.clock()
        for request_id in [r for r, until in self._kept_until.items() if until <= now]:
            self.let_go(request_id)
        self._give_up_late(now)
        for incoming in [i for i in self._draining.values() if i.recompute and not i.aborted]:
            if now - incoming.failed_ns > DRAIN_S * 1e9:
                self._abandon(incoming)
        self._reserve()
        for incoming in self._queued:
            self._hold(incoming)

    def abort(self, request_id: str) -> bool:
        """A read in flight cannot be recalled: its blocks are freed when all ranks are done with it. False
        where nothing of the request is on its way."""
        for here in (self._reading, self._proving, self._draining):
            incoming = here.get(request_id)
            if incoming is not None and (incoming.recompute or here is self._reading):
                incoming.aborted = True
                return True
        for queued in self._queued:
            if queued.request.request_id == request_id:
                self._turn_away(queued)
                return True
        return False

    def on_news(self, rank: int, news: RankNews) -> None:
        """Take a rank's outcomes, and what has drained there."""
        for outcome in news.outcomes:
            self._on_outcome(rank, outcome)
        for lease_id in news.drained:
            for incoming in (*self._reading.values(), *self._draining.values(), *self._abandoned.values()):
                if incoming.ticket.lease_id == lease_id:
                    incoming.drained.add(rank, True)
                    self._on_drained(incoming)

    def let_go(self, request_id: str) -> None:
        """Nobody looks into this mismatch (any more)."""
        if self._kept_until.pop(request_id, None) is not None:
            self._commands.append(ReleaseMismatch(request_id))
            self._free(request_id)

    def clear(self) -> None:
        """The engine is going down."""
        self._queued.clear()
        self._reading.clear()
        self._draining.clear()
        self._kept_until.clear()
        self._proving.clear()
        self._abandoned.clear()

    def _hold(self, incoming: Incoming) -> None:
        """While a request waits for blocks, all ranks renew its lease."""
        if not incoming.is_announced:
            incoming.is_announced = True
            self._commands.append(HoldTicket(incoming.ticket))

    def _turn_away(self, incoming: Incoming) -> None:
        """It got no blocks: its lease is released, which only ranks that know of it can do."""
        assert self.leader is not None
        self._queued.remove(incoming)
        self._hold(incoming)
        self.leader.manager.free(incoming.request.request_id)  # it has no blocks; its keys are forgotten
        self._commands.append(LetGo(incoming.request.request_id))

    def _give_up_late(self, now: int) -> None:
        assert self.leader is not None
        late = [q for q in self._queued if now - q.submitted_ns > q.reserve_s * 1e9]
        for incoming in late:
            self._turn_away(incoming)
            request_id = incoming.request.request_id
            error = DeadlineExceeded(f"waiting for KV blocks for {request_id}", incoming.reserve_s)
            if incoming.arrived is not None:
                incoming.arrived(0, error, {})
                continue
            self.leader.emit(RequestEvent(request_id=request_id, error=error))

    def _reserve(self) -> None:
        """Start the reads that blocks allow, first come first served: not while a request that is here
        lacks blocks."""
        assert self.leader is not None
        scheduler = self.leader.scheduler
        # Those that are swapped out came first.
        while self._queued and not scheduler.is_short_of_blocks and not scheduler.num_away:
            incoming = self._queued[0]
            request_id = incoming.request.request_id
            num_tokens = incoming.ticket.num_tokens
            token_ids = (*incoming.request.prompt_token_ids, *incoming.output_token_ids)[:num_tokens]
            manager = self.leader.manager
            unit = row_group_blocks(manager.groups)
            salt = incoming.request.cache_salt
            drafts = incoming.ticket.engine not in self._without_drafts
            where = token_ids, num_tokens, unit, salt
            local_prefix = manager.find_local_prefix(request_id, *where, drafts=drafts)
            if local_prefix.num_tokens < incoming.ticket.first_row:
                self._come_to_nothing(incoming)
                continue
            tables = reserve_blocks(self.leader, request_id, num_tokens, local_prefix)
            if tables is None:
                return
            self._queued.popleft()
            self.begin(incoming, tables, local_prefix)

    def _come_to_nothing(self, incoming: Incoming) -> None:
        """What was here when the ticket was asked for, and is not in it, was lost meanwhile."""
        assert self.leader is not None
        self._turn_away(incoming)
        request_id, first = incoming.request.request_id, incoming.ticket.first_row
        error = TransferError(request_id, f"its first {first} tokens are not cached here any more")
        if incoming.arrived is not None:
            incoming.arrived(0, error, {})
        else:
            self.leader.emit(RequestEvent(request_id=request_id, error=error))

    def _on_outcome(self, rank: int, outcome: TransferOutcome) -> None:
        incoming = self._reading.get(outcome.request_id)
        if incoming is not None and incoming.outcomes.add(rank, outcome):
            self._finish_read(incoming)

    def _finish_read(self, incoming: Incoming) -> None:
        assert self.leader is not None
        request_id = incoming.request.request_id
        del self._reading[request_id]
        outcomes = incoming.outcomes.in_order()
        mismatch = next((o.error for o in outcomes if isinstance(o.error, KVMismatch)), None)
        error = mismatch or next((o.error for o in outcomes if o.error is not None), None)
        self._count(error)
        assert incoming.started_ns is not None
        info: dict[str, Any] = {
            "transfers": [row for o in outcomes for row in o.rows],
            "submitted_ns": incoming.submitted_ns,
            "taken_ns": incoming.taken_ns,
            "stage_ns": arrival_stages(outcomes, incoming.taken_ns, incoming.started_ns, self.leader.clock()),
            "num_kv_bytes_checked": sum(o.num_bytes_checked for o in outcomes),
        }
        if error is None and not incoming.aborted:
            self._note_drafts(incoming, outcomes)
        if error is None and not incoming.aborted and incoming.arrived is not None:
            incoming.arrived(incoming.ticket.num_tokens, None, info)
            return
        if error is None and not incoming.aborted:
            self.leader.start(incoming.request, incoming.output_token_ids)
            self.leader.emit(RequestEvent(request_id=request_id, info=EventInfo(**info)))
            return
        for rank, outcome in enumerate(outcomes):
            if not outcome.is_draining:
                incoming.drained.add(rank, True)
        self._draining[request_id] = incoming
        if incoming.recompute and not incoming.aborted:
            incoming.failure, incoming.info, incoming.failed_ns = error, info, self.leader.clock()
            if mismatch is not None:
                self._commands.append(ReleaseMismatch(request_id))
            self._on_drained(incoming)
            return
        if mismatch is not None:
            # The blocks stay as they are until somebody has looked into it (`settle`).
            self._kept_until[request_id] = self.leader.clock() + int(HOLD_S * 1e9)
        if incoming.aborted:
            self.let_go(request_id)
        self._on_drained(incoming)
        self.leader.emit(RequestEvent(request_id=request_id, error=error, info=EventInfo(**info)))

    def _note_drafts(self, incoming: Incoming, outcomes: Sequence[TransferOutcome]) -> None:
        """What came lacks rows of draft layers, where these were left out or the producer lacked them."""
        assert self.leader is not None
        manager, ticket = self.leader.manager, incoming.ticket
        if not manager.has_riders:
            return
        are_left_out = any(outcome.left_out for outcome in outcomes)
        (self._without_drafts.add if are_left_out else self._without_drafts.discard)(ticket.engine)
        first = ticket.num_tokens if are_left_out else ticket.draft_row
        manager.lack_drafts(incoming.request.request_id, first)

    def _count(self, error: RaykError | None) -> None:
        """Here the ranks' verdicts on a request meet: no rank alone knows how many requests failed."""
        if error is None:
            self.num_received += 1
        else:
            self.num_failed[verdict_of(error)] += 1

    def _on_drained(self, incoming: Incoming) -> None:
        """Where nothing of a failed transfer is in flight: free its blocks, or see what arrived."""
        if not incoming.drained.is_complete:
            return
        request_id = incoming.request.request_id
        if self._draining.get(request_id) is incoming and incoming.recompute and not incoming.aborted:
            self._proving[request_id] = self._draining.pop(request_id)
            self._commands.append(
                Prove(incoming.ticket, incoming.block_tables, incoming.local_prefix.num_tokens)
            )
        elif incoming in self._abandoned.values():
            assert self.leader is not None
            lease_id = _abandoned_lease(incoming)
            del self._abandoned[lease_id]
            self.leader.manager.release(lease_id)
        else:
            self._free(request_id)

    def on_proof(self, command: Prove, answers: list[Any]) -> None:
        """Every rank said what arrived: compute the rest."""
        incoming = self._proving.pop(command.ticket.request_id, None)
        if incoming is None:
            return
        assert self.leader is not None
        manager, num_tokens = self.leader.manager, command.ticket.num_tokens
        proofs = [[] if isinstance(a, RaykError) else a for a in answers]
        num_valid = longest_valid_prefix(manager.groups, proofs, num_tokens)
        if manager.has_riders and not incoming.aborted:
            # Rows of draft layers alone never make it shorter.
            are_there = longest_valid_prefix(manager.all_groups, proofs, num_tokens) >= num_valid
            first = command.ticket.draft_row if are_there else num_valid
            manager.lack_drafts(incoming.request.request_id, first)
        self._go_on(incoming, num_valid)

    def _abandon(self, incoming: Incoming) -> None:
        """Reads in flight do not end: they keep the blocks, the request gets others."""
        assert self.leader is not None
        request_id = incoming.request.request_id
        del self._draining[request_id]
        lease_id = _abandoned_lease(incoming)
        self.leader.manager.lease(request_id, lease_id)
        self._abandoned[lease_id] = incoming
        self._go_on(incoming, 0)

    def _go_on(self, incoming: Incoming, num_valid: int) -> None:
        """Compute a request from its first `num_valid` tokens on, whose KV is in its blocks."""
        assert self.leader is not None
        request_id = incoming.request.request_id
        if num_valid < incoming.local_prefix.num_tokens:
            num_valid = 0  # what is computed goes into blocks of its own; the cache is asked again
        if incoming.aborted or not num_valid:
            self.leader.manager.free(request_id)
        if incoming.aborted:
            return
        if incoming.arrived is not None:
            incoming.arrived(num_valid, incoming.failure, incoming.info)
            return
        self.leader.start(incoming.request, incoming.output_token_ids, num_valid)
        info = {
            **incoming.info,
            "failure": incoming.failure,
            "num_valid_tokens": num_valid,
        }
        self.leader.emit(RequestEvent(request_id=request_id, info=EventInfo(**info)))

    def _free(self, request_id: str) -> None:
        """Give a failed request's blocks back, once nothing writes to them and nobody looks at them."""
        incoming = self._draining.get(request_id)
        if incoming is not None and incoming.drained.is_complete and request_id not in self._kept_until:
            assert self.leader is not None
            del self._draining[request_id]
            self.leader.manager.free(request_id)


def _abandoned_lease(incoming: Incoming) -> str:
    return IN_FLIGHT + incoming.ticket.lease_id
