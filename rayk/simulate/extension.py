"""Answer a simulated engine's hand-over commands as its ranks would: handover.extension over cost tables.

One extension stands for all ranks of an engine, of which the slowest counts. Nothing is moved: tickets,
posting, waiting and checks take the time that the tables say; leases are kept by the table of real ranks; and
blocks that are handed out again while somebody reads them are missed, as by their generations.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from rayk.costs.table import EngineCosts, LinearCost
from rayk.handover.commands import (
    EndLease,
    EndReads,
    HoldTicket,
    LetGo,
    MakeStore,
    MakeTicket,
    Prove,
    RankNews,
    ReleaseMismatch,
    StartRead,
    TicketPart,
)
from rayk.handover.receiving import DRAIN_S
from rayk.kv.manager import KVCacheManager
from rayk.simulate.clock import Event, LocalClock
from rayk.simulate.network import Message, SimNetwork
from rayk.simulate.outcome import SimEngineAccount
from rayk.simulate.pull import SimRead, layer_proofs, offered_blocks
from rayk.transfer.consumer import TransferOutcome, refusal
from rayk.transfer.lease import RENEWALS_PER_LEASE, LeaseTable, ReleaseMessage, Renewals, RenewMessage
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.valid_prefix import LayerProof
from rayk.types.config import EngineConfig
from rayk.types.errors import HandshakeMismatch, RaykError, TransferError

FAILED_KEPT = 1024
"""Reads that failed are kept for a proof, the last so many."""
_FREE = LinearCost()
_NO_DIGESTS = np.zeros(0, dtype=np.int64)
_NO_NEWS = RankNews((), (), (), ())


class ExtensionHost(Protocol):
    """The engine that an extension is of. Implemented by simulate.engine."""

    name: str
    epoch: int
    clock: LocalClock
    role: str
    config: EngineConfig
    costs: EngineCosts
    manager: KVCacheManager
    account: SimEngineAccount

    def work(self, length_ns: float) -> int:
        """Take time on every rank, once the steps before have run; return how long."""
        ...

    def wake(self, at_ns: int = 0) -> None:
        """Take a turn."""
        ...

    def cut_span(self) -> None:
        """Plan anew what it does until the extension has news."""
        ...


@dataclass(slots=True)
class _Held:
    """A ticket whose lease this engine needs."""

    ticket: TransferTicket
    renewals: Renewals
    event: Event | None = None  # the next renewal


class SimExtension:
    """Implements engine.loop.RankExtension and simulate.network.Peer."""

    def __init__(self, host: ExtensionHost, network: SimNetwork) -> None:
        self.name, self.epoch, self.config = host.name, host.epoch, host.config
        self.num_acts = 0
        """Commands carried out, and polls that had news."""
        self._host, self._network = host, network
        self._leases = LeaseTable()
        self._watch: Event | None = None  # of the next end of a lease
        self._generations = [0] * host.manager.pool.num_blocks
        self._held: dict[str, _Held] = {}
        self._reading: dict[str, SimRead] = {}
        self._draining: dict[str, SimRead] = {}
        self._failed: OrderedDict[str, SimRead] = OrderedDict()
        self._outcomes: list[TransferOutcome] = []
        self._digested_ns = 0  # when the thread that digests stores is done with all
        self._stored: deque[tuple[int, str, TicketPart]] = deque()
        """Stores, each with when it is digested."""
        self._reads_since_ns = 0  # of those in `_reading`, if there are any
        network.join(self, reads=host.role == "decode")

    # engine.loop.RankExtension.

    def execute(self, command: object) -> object:
        """Run one command; see handover.commands."""
        self.num_acts += 1
        # Pages are read and written when no step uses them any more.
        self._host.work(self._cost("each").ns())
        match command:
            case MakeTicket():
                return self._make_ticket(command)
            case MakeStore():
                self._make_store(command)
            case StartRead():
                self._start_read(command)
            case HoldTicket(ticket):
                self._hold(ticket)
            case LetGo(request_id):
                if (held := self._held.get(request_id)) is not None:
                    self._release(held.ticket)
            case EndLease(lease_id):
                self._leases.end(lease_id)
            case _:
                return self._after_failure(command)
        return None

    def _after_failure(self, command: object) -> object:
        match command:
            case EndReads(engine, epoch):
                self.end_reads(engine, epoch)
            case Prove():
                return self._proofs(command)
            case ReleaseMismatch():
                pass  # nothing differs here
            case _:
                raise AssertionError(f"not simulated: {command!r}")
        return None

    def blocks_assigned(self, block_ids: Iterable[int]) -> None:
        """Count the generations of blocks that change hands."""
        for block in block_ids:
            self._generations[block] += 1

    def poll(self) -> RankNews | None:
        """Go on with reads; tell what of leases and reads is over."""
        now_ns = self._host.clock()
        for read in list(self._reading.values()):
            self._step(read, now_ns)
        outcomes, self._outcomes = tuple(self._outcomes), []
        drained = tuple(lease_id for lease_id, read in self._draining.items() if self._is_over(read, now_ns))
        for lease_id in drained:
            self._draining.pop(lease_id).arrived(now_ns)
        released = tuple(self._leases.take_released())
        expired = tuple(self._leases.expire(now_ns))
        self._host.account.num_expired_leases += len(expired)
        if released or expired or self._watch is None:
            self._watch_leases()
        news = RankNews(outcomes, drained, released, expired, stored=tuple(self._take_stored(now_ns)))
        if news == _NO_NEWS:
            return None
        self.num_acts += 1
        return news

    def next_ns(self) -> int | None:
        """Tell when a poll may have news, as far as is known: not before this time."""
        times = [t for t in (self._leases.next_end_ns,) if t is not None]
        times += [at_ns for at_ns, _, _ in self._stored]
        for read in (*self._reading.values(), *self._draining.values()):
            if read.fenced_ns is not None:
                times.append(read.fenced_ns)
            elif read.flow is not None:
                times.append(min(read.deadline_ns, self._network.links.expected_ns(read.flow)))
        return min(times, default=None)

    def close(self) -> None:
        """The engine's life is over: nobody hears of it, and nothing here is awaited."""
        self._network.leave(self)
        for held in self._held.values():
            self._cancel(held.event)
        self._cancel(self._watch)
        for read in (*self._reading.values(), *self._draining.values()):
            if read.flow is not None:
                self._network.links.end(read.flow, self._network.world.now_ns)

    # simulate.network.Peer.

    def take(self, message: Message) -> None:
        """A reader has news of a lease: the engine sees a release at its next poll."""
        if isinstance(message, RenewMessage):
            self._leases.on_renew(message, self._network.world.now_ns)
            return
        self._leases.on_release(message)
        self._host.wake()

    def generations(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self._generations.__getitem__, block_ids))

    # The producer's part.

    def _make_ticket(self, command: MakeTicket) -> TicketPart:
        host, began_ns = self._host, self._host.clock()
        renewed_ns = self._network.renewed_ns
        self.lease(command.lease_id, began_ns + self._network.lease_ns, renewed_ns)
        generations = tuple(self.generations(table) for table in command.block_tables)
        num_bytes = self._network.lent_bytes(self.config, command.num_tokens)
        digest_ns = host.work(self._cost("MakeTicket").ns(num_bytes))
        return TicketPart(_NO_DIGESTS, generations, renewed_ns, digest_ns)

    def lease(self, lease_id: str, deadline_ns: int, renewed_ns: int | None = None) -> None:
        """Open a lease; `renewed_ns`: it ends if nobody renews it for so long."""
        self._leases.open(lease_id, deadline_ns, now_ns=self._host.clock(), lease_ns=renewed_ns)
        self._watch_leases()

    def _make_store(self, command: MakeStore) -> None:
        """Digest what a host tier is to read, on a thread beside the steps, store by store."""
        assert command.outbox_tables is None, "outboxes are not simulated"
        network, now_ns = self._network, self._host.clock()
        self.lease(command.lease_id, now_ns + network.lease_ns, network.renewed_ns)
        generations = tuple(self.generations(table) for table in command.block_tables)
        num_bytes = network.stored_bytes(self.config, command.first_row, command.num_tokens)
        digest_ns = round(self._cost("MakeTicket").ns(num_bytes))
        self._digested_ns = max(now_ns, self._digested_ns) + digest_ns
        part = TicketPart(_NO_DIGESTS, generations, network.renewed_ns, digest_ns)
        self._stored.append((self._digested_ns, command.name, part))
        network.world.at(self._digested_ns, self._host.wake)

    def _take_stored(self, now_ns: int) -> Iterator[tuple[str, TicketPart]]:
        """Yield the stores that are digested by now."""
        while self._stored and self._stored[0][0] <= now_ns:
            _, name, part = self._stored.popleft()
            yield name, part

    def _watch_leases(self) -> None:
        """Have the engine poll when a lease may end by itself."""
        at_ns = self._leases.next_end_ns
        if self._watch is not None and self._watch.at_ns != at_ns:
            self._cancel(self._watch)
            self._watch = None
        if self._watch is None and at_ns is not None:
            self._watch = self._network.world.at(at_ns, self._on_watch)

    def _on_watch(self) -> None:
        self._watch = None
        self._host.wake()

    # The consumer's part.

    def _hold(self, ticket: TransferTicket) -> None:
        if ticket.request_id not in self._held:
            self._held[ticket.request_id] = _Held(ticket, Renewals(ticket.lease_ns))
            self._renew(ticket.request_id)

    def _renew(self, request_id: str) -> None:
        """Say that a lease is still needed, now and, as real ranks do, several times within its length."""
        held, network = self._held[request_id], self._network
        ticket, at_ns = held.ticket, self._host.clock()
        if ticket.lease_ns is not None and held.renewals.is_due(at_ns):
            message = RenewMessage(ticket.lease_id, self.name, held.renewals.num_sent)
            network.tell(at_ns, ticket.engine, ticket.epoch, message)
            again_ns = at_ns + ticket.lease_ns // RENEWALS_PER_LEASE
            held.event = network.world.at(again_ns, partial(self._renew, request_id))

    def _release(self, ticket: TransferTicket) -> None:
        """A lease is needed no longer."""
        held = self._held.pop(ticket.request_id, None)
        if held is not None:
            self._cancel(held.event)
        message = ReleaseMessage(ticket.lease_id, self.name, 1)
        self._network.tell(self._host.clock(), ticket.engine, ticket.epoch, message)

    def _start_read(self, command: StartRead) -> None:
        try:
            read = self._plan(command)
        except RaykError as error:
            self._release(command.ticket)
            self._outcomes.append(refusal(command.ticket, error))
            return
        self._post(read)

    def _plan(self, command: StartRead) -> SimRead:
        """Raises HandshakeMismatch where the producer is gone, TransferError where nothing may be read."""
        ticket, network, began_ns = command.ticket, self._network, self._host.clock()
        producer = network.peer(ticket.engine, ticket.epoch)
        if producer is None:
            epoch = network.epoch(ticket.engine)
            connected = "not connected" if epoch is None else f"{ticket.engine} epoch {epoch}"
            raise HandshakeMismatch((("engine", f"{ticket.engine} epoch {ticket.epoch}", connected),))
        pair, tables = (
            network.pairing(producer.config, self.config),
            (ticket.block_tables, command.block_tables),
        )
        try:
            rows = pair.plans.rows(ticket.request_id, ticket.num_tokens, *tables, first_row=command.first_row)
        except TransferError as error:
            raise TransferError(ticket.request_id, error.reason) from error
        read = SimRead(command, pair, rows, began_ns, began_ns + int(command.deadline_s * 1e9))
        read.lay_out()
        return read

    def _post(self, read: SimRead) -> None:
        """Post a read; where the reader copies the bytes itself, go on until all is proven."""
        host, network = self._host, self._network
        if read.pair.reads_in_post or not read.moves:
            host.account.read_ns += host.work(read.post_ns + read.wait_ns)
            read.arrived(host.clock())
            if host.clock() >= read.deadline_ns:
                self._fail(read, "deadline passed while reading")
                return
            if read.moves:
                read.stage_ns["fence"] = host.work(self._cost("fence").ns())
            self._check(read)
            return
        if not self._reading:
            self._reads_since_ns = host.clock()
        host.work(read.post_ns)
        self._reading[read.ticket.request_id] = read
        self._hold(read.ticket)
        fixed_ns = min(read.pair.costs.wait.fixed_ns, read.wait_ns)
        read.flow = network.links.begin(
            (read.ticket.engine, self.name),
            host.clock(),
            fixed_ns=fixed_ns,
            shared_ns=read.wait_ns - fixed_ns,
            on_end=host.wake,
            on_sooner=host.cut_span,
        )
        read.timer = network.world.at(read.deadline_ns, host.wake)

    def _step(self, read: SimRead, now_ns: int) -> None:
        """Go on with a read under way, as far as it has come by now."""
        if read.fenced_ns is None:
            is_here = self._is_over(read, now_ns)
            if is_here:
                read.arrived(now_ns)
            if now_ns >= read.deadline_ns:
                self._fail(read, "deadline passed while reading", is_draining=not is_here)
                return
            if not is_here:
                return
            read.fenced_ns = now_ns + round(self._cost("fence").ns())
            if read.fenced_ns > now_ns:
                self._network.world.at(read.fenced_ns, self._host.wake)
        if read.fenced_ns <= now_ns:
            read.stage_ns["fence"] = now_ns - read.began_ns - read.stage_ns["read"]
            self._check(read)

    def _is_over(self, read: SimRead, now_ns: int) -> bool:
        """Tell whether all that a read moves is here."""
        assert read.flow is not None
        if (end_ns := self._network.links.expected_ns(read.flow)) > now_ns:
            return False
        self._network.links.end(read.flow, end_ns)
        return True

    def _check(self, read: SimRead) -> None:
        """All is here: compare generations, then digests."""
        ticket, host = read.ticket, self._host
        producer = self._network.peer(ticket.engine, ticket.epoch)
        if producer is None:
            self._fail(read, f"producer engine {ticket.engine} is gone")
            return
        blocks, generations = offered_blocks(ticket)
        found = producer.generations(blocks)
        if read.moves and found != generations:
            each = zip(blocks, generations, found, strict=True)
            lost = {block: (before, now) for block, before, now in each if before != now}
            read.lost = frozenset(lost)
            block, (before, now) = next(iter(lost.items()))
            self._fail(read, f"block {block} was reused while being read (generation {before} -> {now})")
            return
        read.proved(host.work(self._cost("verify").ns(read.rank_bytes)))
        self._end(read)
        self._outcomes.append(read.outcome())

    def _fail(self, read: SimRead, reason: str, *, is_draining: bool = False) -> None:
        error = TransferError(read.ticket.request_id, reason)
        error.producer, error.consumer = read.ticket.engine, self.name
        self._end(read)
        self._failed[read.ticket.request_id] = read
        if len(self._failed) > FAILED_KEPT:
            self._failed.popitem(last=False)
        if is_draining:
            self._draining[read.ticket.lease_id] = read
            self._network.world.at(self._host.clock() + int(DRAIN_S * 1e9) + 1, self._host.wake)
        self._outcomes.append(read.outcome(error, is_draining=is_draining))

    def _end(self, read: SimRead) -> None:
        """Nobody waits for a read any more, and its lease is needed no longer."""
        was_there = self._reading.pop(read.ticket.request_id, None) is not None
        if was_there and not self._reading:
            self._host.account.read_ns += self._host.clock() - self._reads_since_ns
        self._cancel(read.timer)
        self._release(read.ticket)

    def end_reads(self, engine: str, epoch: int) -> None:
        """This life of a producer engine is over: what is read from it fails, and nothing of it comes."""
        for read in list(self._reading.values()):
            if (read.ticket.engine, read.ticket.epoch) == (engine, epoch):
                assert read.flow is not None
                self._network.links.end(read.flow, self._host.clock())
                self._fail(read, f"producer engine {engine} is gone")

    def _proofs(self, command: Prove) -> list[LayerProof]:
        """Say what of a failed read arrived all the same; nothing of one that never began."""
        read = self._failed.pop(command.ticket.request_id, None)
        if read is None:
            return []
        self._host.work(self._cost("verify").ns(read.rank_bytes))
        return layer_proofs(read, self._host.manager.groups, command.first_row)

    def _cost(self, name: str) -> LinearCost:
        return self._host.costs.commands.get(name, _FREE)

    def _cancel(self, event: Event | None) -> None:
        if event is not None:
            self._network.world.cancel(event)
