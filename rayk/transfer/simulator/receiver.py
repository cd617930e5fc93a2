"""One consumer rank's transfer of one job: carries out what its session says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rayk.transfer import session as s
from rayk.transfer.lease import ReleaseMessage, Renewals, RenewMessage
from rayk.transfer.simulator.core import Copy, Flight
from rayk.transfer.simulator.producer import read_rows
from rayk.transfer.simulator.requests import Ticket
from rayk.transfer.valid_prefix import LayerProof, proven_rows
from rayk.types.errors import KVMismatch, RaykError

if TYPE_CHECKING:
    from rayk.transfer.simulator.consumer import Consumer, Incoming
    from rayk.transfer.simulator.producer import Producer

TRANSFER_DEADLINE = 110
ROWS_PER_GROUP = 4
"""Of digests."""


class Receiver:
    """See the module. `is_push`: what is read otherwise is waited for."""

    def __init__(self, consumer: Consumer, rank: int, incoming: Incoming, renewals: Renewals) -> None:
        assert incoming.ticket is not None
        self.consumer = consumer
        self.rank = rank
        self.incoming = incoming
        self.ticket: Ticket = incoming.ticket
        self.producer: Producer = consumer.world.producer_of(self.ticket)
        self.is_push = consumer.world.mode == "push"
        self.heads = consumer.heads(rank)
        self.verdict: s.Finish | None = None
        self.finished_at = 0
        self._renewals = renewals
        self._flights: dict[int, Flight] = {}
        self._fences: dict[int, Flight] = {}
        self.sources = [p for p in range(self.producer.tp) if self._shared(p)]
        self._reads = [(p, layer) for p in self.sources for layer in (0, 1)]
        num_reads = len(self.sources) if self.is_push else len(self._reads)
        self.deadline = consumer.clock.now + TRANSFER_DEADLINE
        self.session = s.Session(
            incoming.job.job_id,
            num_reads=num_reads,
            fences={} if self.is_push else {p: self._fence() for p in self.sources},
            notify=self.sources,
            deadline_ns=self.deadline,
            renewals=renewals,
        )

    def start(self) -> None:
        """Post what there is to post."""
        self._run(deque(self.session.start()))

    def handle(self, event: s.Event) -> None:
        """Have the session take note, and do what it says."""
        self._run(deque(self.session.handle(event, self.consumer.clock.now)))

    def release(self) -> None:
        """After a mismatch: nobody looks into it any more."""
        self._run(deque(self.session.release()))

    def poll_arrivals(self) -> None:
        """Push: see which producer ranks have arrived, or stopped."""
        table, reservation = self.consumer.reservations[self.rank], self.incoming.job.job_id
        for rank in table.arrived(reservation, self.ticket.attempt):
            self.handle(s.ReadDone(self.sources.index(rank)))
        for rank, why in table.stopped(reservation).items():
            if rank in self.sources:
                self.handle(s.ReadEnded(self.sources.index(rank), why or "the producer rank stopped"))

    def stopped_all(self) -> None:
        """Push: no producer rank writes here any more."""
        for read in range(len(self.sources)):
            self.handle(s.ReadEnded(read, "the producer rank stopped"))

    def prove(self) -> list[LayerProof]:
        """What is here of what the ticket says, whatever went wrong."""
        model, job = self.consumer.world.model, self.incoming.job
        proofs = []
        for layer in (0, 1):
            live = model.live_rows(layer, job.num_tokens)
            wrong = {position // ROWS_PER_GROUP for position in self._wrong_positions(layer)}
            proofs.append(LayerProof(layer, layer, proven_rows(live, ROWS_PER_GROUP, wrong)))
        return proofs

    def _wrong_positions(self, layer: int) -> list[int]:
        world, job = self.consumer.world, self.incoming.job
        start = world.model.live_rows(layer, job.num_tokens).start
        wrong = []
        for head in self.heads:
            memory, tables = self.consumer.memory, self.incoming.tables
            found = read_rows(world, memory, tables, layer, head, job.num_tokens)
            expected = self.ticket.digests[layer, head]
            if found != expected:
                wrong += [start + i for i, row in enumerate(found) if row != expected[i]]
        return wrong

    def _shared(self, producer_rank: int) -> list[int]:
        return [h for h in self.producer.heads(producer_rank) if h in self.heads]

    def _fence(self) -> s.Fence:
        sealed = self.ticket.blocks
        held = {
            block: generation
            for table, generations in zip(sealed.tables, sealed.generations, strict=True)
            for block, generation in zip(table, generations, strict=True)
            if block
        }
        return s.Fence(tuple(held), tuple(held.values()))

    def _run(self, todo: deque[s.Action]) -> None:
        clock = self.consumer.clock
        while todo and self.consumer.runs:
            for event in self._carry_out(todo.popleft()):
                todo.extend(self.session.handle(event, clock.now))

    def _carry_out(self, action: s.Action) -> list[s.Event]:
        match action:
            case s.PostReads(reads):
                for read in reads if not self.is_push else ():
                    self._post(read)
            case s.PostFence(rank):
                self._post_fence(rank)
            case s.ComputeDigests():
                return [s.Verified(self._verify())]
            case s.Cancel(reads, fences):
                return self._cancel(reads, fences)
            case s.Release(ranks):
                self._tell(ranks, "free")
            case s.Renew(ranks, _):
                self._tell(ranks, "lease_renewal")
            case s.Finish(error, is_draining):
                self._finish(action, error, is_draining)
            case s.Drained():
                self.consumer.on_drained(self.incoming, self.rank)
        return []

    def _finish(self, action: s.Finish, error: RaykError | None, is_draining: bool) -> None:
        clock = self.consumer.clock
        if self.verdict is not None:
            clock.violate(f"{self.incoming.job.job_id} finished twice on rank {self.rank}")
        self.verdict, self.finished_at = action, clock.now
        clock.log(f"{self.consumer.name} rank {self.rank}: {self.incoming.job.job_id}: {error or 'proven'}")
        if not is_draining:
            self.consumer.on_drained(self.incoming, self.rank)
        self.consumer.on_verdict(self.incoming)

    def _post(self, read: int) -> None:
        producer_rank, layer = self._reads[read]
        live = self.consumer.world.model.live_rows(layer, self.incoming.job.num_tokens)
        place = self.consumer.world.model.place
        indices = sorted({place(layer, position)[0] for position in live})
        copies = [
            (
                (layer, head, self.ticket.blocks.tables[layer][i]),
                (layer, head, self.incoming.tables[layer][i]),
            )
            for i in indices
            for head in self._shared(producer_rank)
        ]
        flight = self._flight(copies, ("post", "mid_transfer"), partial(self._on_read, read))
        self._flights[read] = flight
        flight.post()

    def _on_read(self, read: int, is_ok: bool) -> None:
        self._flights.pop(read, None)
        self.handle(s.ReadDone(read) if is_ok else s.ReadEnded(read, "a read failed"))

    def _post_fence(self, rank: int) -> None:
        flight = self._flight([], ("notify", None), partial(self._on_fence, rank))
        self._fences[rank] = flight
        flight.post()

    def _on_fence(self, rank: int, is_ok: bool) -> None:
        flight = self._fences.pop(rank, None)
        if not is_ok:
            self.handle(s.FenceEnded(rank, "reading generations failed"))
            return
        generations = self.producer.memory.generations
        found = [generations[b] for table in self.ticket.blocks.tables for b in table if b]
        found[0] += int(flight is not None and flight.is_corrupt)
        self.handle(s.FenceDone(rank, tuple(found)))

    def _flight(
        self, copies: list[Copy], points: tuple[str | None, str | None], done: Callable[[bool], None]
    ) -> Flight:
        consumer = self.consumer
        job_id = self.incoming.job.job_id
        return Flight(consumer.clock, self.producer, consumer, consumer, job_id, copies, points, done)

    def _cancel(self, reads: tuple[int, ...], fences: tuple[int, ...]) -> list[s.Event]:
        if self.is_push:
            self.consumer.stop_pushes(self.incoming, self.rank)
            return []
        events: list[s.Event] = []
        for read in reads:
            if read not in self._flights or self._flights[read].cancel():
                self._flights.pop(read, None)
                events.append(s.ReadEnded(read, "cancelled"))
        for rank in fences:
            if rank not in self._fences or self._fences[rank].cancel():
                self._fences.pop(rank, None)
                events.append(s.FenceEnded(rank, "cancelled"))
        return events

    def _verify(self) -> KVMismatch | None:
        for layer in (0, 1):
            wrong = self._wrong_positions(layer)
            if wrong:
                job_id = self.incoming.job.job_id
                return KVMismatch(job_id, layer, layer, "k", self.heads[0], wrong[0], "not what was sent")
        return None

    def _tell(self, ranks: tuple[int, ...], point: str) -> None:
        tell(self.consumer, self.rank, self.ticket, ranks, point, self._renewals.num_sent)


def tell(
    consumer: Consumer, rank: int, ticket: Ticket, ranks: tuple[int, ...], point: str, number: int
) -> None:
    """Release (at point free) or renew a lease at producer ranks."""
    producer = consumer.world.producer_of(ticket)
    me = f"{consumer.name}/{consumer.epoch}/{rank}"
    for to in ranks:
        readers = [r for r in range(consumer.tp) if set(consumer.heads(r)) & set(producer.heads(to))]
        if point == "free":
            message = ReleaseMessage(ticket.lease_id, me, len(readers)).encode()
        else:
            message = RenewMessage(ticket.lease_id, me, number).encode()
        consumer.clock.notify(producer, consumer, producer, to, message, point)
