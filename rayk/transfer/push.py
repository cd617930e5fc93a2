"""Carries out one request's push from a producer rank: a session per consumer rank, and its writes.

Belongs to the pusher's thread. `Push` is driven by what the engine has computed; `poll` sees writes to their
ends and tells the consumer ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from rayk.transfer import push_session as p
from rayk.transfer.agent import Transfer, TransferAgent, TransferState
from rayk.transfer.costs import MAX_DESCRIPTORS
from rayk.transfer.draining import Drained, Failed, Finish, Tick
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.plan import BlockReads, TransferPlan
from rayk.transfer.push_link import ConsumerLink, PreparedWrites
from rayk.transfer.push_messages import ArrivedMessage, StoppedMessage, Tally, WroteMessage
from rayk.transfer.ticket import Reservation
from rayk.types.errors import TransferError

BlockTables = tuple[tuple[int, ...], ...]


def parts_of(write: BlockReads, max_descriptors: int) -> Iterator[BlockReads]:
    """Yield a write in parts of so many descriptors at most, none of less than a block."""
    size = max(1, max_descriptors // max(1, len(write.pattern.runs)))
    for first in range(0, len(write.source_blocks), size):
        part = slice(first, first + size)
        yield replace(
            write,
            source_blocks=write.source_blocks[part],
            destination_blocks=write.destination_blocks[part],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens of a prompt that one step computes."""

    reservation: Reservation
    attempt: int
    """Counts how often the request began anew."""
    start: int
    stop: int
    block_tables: BlockTables
    """Per group, the producer manager's ids, as far as the chunk's end."""
    layer_ns: float = 0.0
    """What computing a layer takes here, where writes overlap with it; else 0."""

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.stop == self.reservation.num_tokens


@dataclass(slots=True)
class _PostedWrite:
    """A session's write, as long as any of it is in flight."""

    transfers: dict[Transfer, tuple[BlockReads, int]] = field(default_factory=dict)
    """-> what it moves, and for which attempt."""
    failure: str | None = None


@dataclass(slots=True)
class _Sums:
    """One group's share of an attempt."""

    num_bytes: int = 0
    num_descriptors: int = 0
    num_merged: int = 0
    num_writes: int = 0
    num_early_writes: int = 0
    post_ns: int = 0
    busy_ns: int = 0
    """While at least one write was in flight."""
    num_in_flight: int = 0
    busy_since_ns: int = 0


@dataclass(eq=False)
class Push:
    """`is_computed` tells, at once, whether the prompt's last layer was computed."""

    reservation: Reservation
    link: ConsumerLink
    agent: TransferAgent
    me: CacheDescription
    clock: Callable[[], int]
    deadline_ns: int
    is_computed: Callable[[], bool]
    layers_per_write: int
    attempt: int = 0
    is_void: bool = False
    """The attempt's blocks were taken: the request begins anew, if at all."""
    num_posted: int = 0
    """Writes, of all attempts."""
    by_rank: dict[int, _RankPush] = field(init=False)
    """Pushes by consumer rank."""

    def __post_init__(self) -> None:
        self.by_rank = {rank: _RankPush(self, rank, plan) for rank, plan in self.link.plans.items()}

    @property
    def is_over(self) -> bool:
        """Nothing is in flight nor will be."""
        return all(push_to.session.is_drained for push_to in self.by_rank.values())

    def begin(self, chunk: Chunk) -> None:
        """A chunk is about to be computed; of another attempt, if the request was preempted meanwhile."""
        if chunk.attempt != self.attempt:
            self.void()
            self.attempt, self.is_void = chunk.attempt, False

    def computed(self, layer: int, chunk: Chunk) -> None:
        """The kernels of a layer (its position in the link's) are done for a chunk."""
        if self.is_void or chunk.attempt != self.attempt:
            return
        event = p.LayersComputed((layer,), chunk.start, chunk.stop, chunk.is_last)
        for push_to in self.by_rank.values():
            push_to.chunk = chunk
            push_to.handle(event)

    def void(self) -> None:
        """What was written so far is worth nothing: its blocks go to others once nothing is in flight. A
        prompt that is computed will not be computed again."""
        if self.is_computed():
            self.fail("its blocks were given up by the producer")
        elif not self.is_void:
            self.is_void = True
            for push_to in self.by_rank.values():
                push_to.begin_again()

    def fail(self, reason: str, rank: int | None = None) -> None:
        """Write no more: to one consumer rank, or to any."""
        for push_to in self.by_rank.values():
            if rank is None or rank == push_to.rank:
                push_to.handle(Failed(reason))

    @property
    def failure(self) -> str:
        """Why it failed; empty where it has not."""
        return next((push_to.why for push_to in self.by_rank.values() if push_to.why), "")

    def poll(self) -> None:
        """Make progress."""
        for push_to in self.by_rank.values():
            push_to.poll()

    @property
    def num_in_flight(self) -> int:
        """Writes that have not ended."""
        return sum(len(push_to.posted) for push_to in self.by_rank.values())


class _RankPush:
    """A push to one consumer rank."""

    def __init__(self, push: Push, rank: int, plan: TransferPlan) -> None:
        self.rank = rank
        self.posted: dict[int, _PostedWrite] = {}
        self.chunk: Chunk | None = None
        """The one that events are about."""
        self.session = p.PushSession(
            push.reservation.request_id,
            num_layers=len(push.link.layers),
            late_layers=push.link.late_layers,
            layers_per_write=push.layers_per_write,
            deadline_ns=push.deadline_ns,
        )
        self._push = push
        self._plan = plan
        self._consumer = push.link.consumers[rank]
        self._prepared: PreparedWrites = push.link.prepared[rank]
        self._num_writes = 0
        """Posted in this attempt."""
        self._sums: dict[int, _Sums] = {}
        """Sums of this attempt by the consumer's group."""
        self.why = ""
        """Tells why the push failed; empty while it has not."""

    def handle(self, event: p.Event) -> None:
        """Carry out what an event leads to, and whatever follows from that."""
        todo = deque(self.session.handle(event, self._push.clock()))
        while todo:
            for caused in self._carry_out(todo.popleft()):
                todo.extend(self.session.handle(caused, self._push.clock()))

    def begin_again(self) -> None:
        """The attempt is void."""
        self.handle(p.Preempted())
        self._num_writes = 0
        self._sums.clear()

    def poll(self) -> None:
        """Follows writes to their ends."""
        for write in tuple(self.posted):
            for event in self._poll(write):
                self.handle(event)
        self.handle(Tick())

    def _carry_out(self, action: p.Action) -> list[p.Event]:
        match action:
            case p.PostWrite():
                return self._post(action)
            case p.NotifyArrived():
                tally = tuple(self._tally(group, sums) for group, sums in sorted(self._sums.items()))
                mine = self._push.me.rank
                what = self._push.reservation.reservation_id, self._push.attempt, mine, self._num_writes
                self.notify(ArrivedMessage(*what, tally, self._push.link.told_costs()).encode())
            case p.CancelWrites(writes):
                return [event for write in writes for event in self._cancel(write)]
            case Finish(error):
                self.why = error.reason if isinstance(error, TransferError) else ""
            case Drained():
                self.tell_stopped(self.why)
        return []

    def tell_stopped(self, reason: str = "") -> None:
        """Tell the consumer rank that nothing is in flight nor will be."""
        reservation_id, mine = self._push.reservation.reservation_id, self._push.me.rank
        self.notify(StoppedMessage(reservation_id, mine, reason).encode())

    def notify(self, message: bytes) -> None:
        """Send a message; a peer that is gone needs none."""
        try:
            self._push.agent.notify(self._consumer.agent_name, message)
        except TransferError:
            return

    def _post(self, action: p.PostWrite) -> list[p.Event]:
        """Start a session's write: as many of the agent's as there are patterns, or more."""
        chunk, reservation = self.chunk, self._push.reservation
        assert chunk is not None
        posted = self.posted[action.write] = _PostedWrite()
        try:
            writes = self._plan.lower(
                reservation.num_tokens,
                chunk.block_tables,
                reservation.tables(self.rank),
                layers={self._push.link.layers[i] for i in action.layers},
                rows=range(min(action.stop, max(action.start, reservation.num_cached_tokens)), action.stop),
            )
        except TransferError as error:  # of the consumer's tables
            writes, posted.failure = [], error.reason
        for write in (part for whole in writes for part in parts_of(whole, MAX_DESCRIPTORS)):
            posted.failure = self._post_part(posted, write)
            if posted.failure is not None:
                break
        # Nothing of it may be left to write: where no block ends in the chunk, say.
        return [] if posted.transfers else self._end(action.write)

    def _post_part(self, posted: _PostedWrite, write: BlockReads) -> str | None:
        """Start one write of the agent; return why it could not be started, if so."""
        push = self._push
        ours, theirs = write.indices(push.me.geometry.num_blocks, self._consumer.geometry.num_blocks)
        number = self._num_writes
        ids = push.reservation.reservation_id, push.attempt, push.me.rank
        early = not push.is_computed()
        began = push.clock()
        try:
            handle = self._prepared.take(write.pattern)
        except TransferError as error:
            return error.reason
        try:
            transfer = push.agent.write(handle, ours, theirs, WroteMessage(*ids, number).encode())
        except TransferError as error:
            self._prepared.give_back(write.pattern.key)
            return error.reason
        self._num_writes += 1
        push.num_posted += 1
        posted.transfers[transfer] = (write, push.attempt)
        sums = self._sums.setdefault(write.group, _Sums())
        if not sums.num_in_flight:
            sums.busy_since_ns = began
        sums.num_in_flight += 1
        sums.num_bytes += write.num_bytes
        sums.num_descriptors += write.num_descriptors
        sums.num_merged += write.num_coalesced
        sums.num_writes += 1
        sums.num_early_writes += early
        sums.post_ns += push.clock() - began
        return None

    def _poll(self, number: int) -> list[p.Event]:
        posted = self.posted.get(number)
        if posted is None:
            return []
        for transfer in tuple(posted.transfers):
            state = self._push.agent.poll(transfer)
            if state is not TransferState.PENDING:
                self._push.agent.release(transfer)
                self._forget(posted, transfer)
                if state is TransferState.FAILED:
                    posted.failure = posted.failure or f"a write to {self._consumer.agent_name} failed"
        return [] if posted.transfers else self._end(number)

    def _cancel(self, number: int) -> list[p.Event]:
        posted = self.posted.get(number)
        if posted is None:
            return []
        for transfer in tuple(posted.transfers):
            if self._push.agent.release(transfer):
                self._forget(posted, transfer)
                posted.failure = posted.failure or "cancelled"
        return [] if posted.transfers else self._end(number)

    def _forget(self, posted: _PostedWrite, transfer: Transfer) -> None:
        write, attempt = posted.transfers.pop(transfer)
        self._prepared.give_back(write.pattern.key)
        sums = self._sums.get(write.group)
        if sums is not None and attempt == self._push.attempt:
            sums.num_in_flight -= 1
            if not sums.num_in_flight:
                sums.busy_ns += self._push.clock() - sums.busy_since_ns

    def _end(self, number: int) -> list[p.Event]:
        posted = self.posted.pop(number)
        return [p.WriteDone(number) if posted.failure is None else p.WriteEnded(number, posted.failure)]

    def _tally(self, group: int, sums: _Sums) -> Tally:
        return Tally(
            group,
            sums.num_bytes,
            sums.num_descriptors,
            sums.num_merged,
            sums.num_writes,
            sums.num_early_writes,
            self._push.layers_per_write,
            sums.post_ns,
            sums.busy_ns,
        )
