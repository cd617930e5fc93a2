"""A consumer engine: it takes blocks, receives KV, and decodes only what is proven or computed here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayk.transfer import session as s
from rayk.transfer.lease import Renewals
from rayk.transfer.push_messages import ArrivedMessage, StopMessage, StoppedMessage, decode_push
from rayk.transfer.reservation_state import ReservationTable
from rayk.transfer.simulator.core import Engine
from rayk.transfer.simulator.memory import HEADS, Memory, Row
from rayk.transfer.simulator.producer import LEASE, TICK
from rayk.transfer.simulator.receiver import Receiver, tell
from rayk.transfer.simulator.requests import (
    MAX_OUTPUT,
    WRONG_TOKEN,
    Job,
    Reserved,
    SealedTables,
    Tables,
    Ticket,
    right_rows,
    right_token,
)
from rayk.transfer.valid_prefix import longest_valid_prefix
from rayk.types.errors import DeadlineExceeded, KVMismatch, RaykError, TransferError

if TYPE_CHECKING:
    from rayk.transfer.simulator.producer import Producer
    from rayk.transfer.simulator.world import World

BLOCK_WAIT = 200
HOLD = 200
"""A reservation waits so long for its ticket."""
LOOK = 15
"""Somebody looks into a mismatch for so long."""
DRAIN_WAIT = 40
"""To be recomputed in the same blocks, a request waits so long for what is in flight."""
STEP = 3
WRONG: Row = ("computed from something wrong",)


@dataclass(eq=False, slots=True)
class Incoming:
    """A job here."""

    job: Job
    ticket: Ticket | None = None
    num_delivered: int = 0
    stage: str = "queued"
    """queued, reserved, receiving, recovering, decoding or over."""
    since: int = 0
    tables: Tables = ()
    holder: str = ""
    renewals: list[Renewals] = field(default_factory=list)
    receivers: list[Receiver] = field(default_factory=list)
    drained: set[int] = field(default_factory=set)
    stored: int = 0
    """Positions before this one have rows here."""
    aborted: bool = False
    looked_into: bool = True
    taboo: list[int] = field(default_factory=list)
    """Blocks that somebody may still write into, held under the job's own name."""


class Consumer(Engine):
    """See the module."""

    role = "decode"

    def __init__(self, world: World, name: str, epoch: int, tp: int, memory: Memory) -> None:
        super().__init__(world, name, epoch, tp, memory)
        self.world = world
        self.reservations = [ReservationTable(LEASE // 3) for _ in range(tp)]
        self.jobs: dict[str, Incoming] = {}
        self._queue: deque[Incoming] = deque()
        self._reserved_at: dict[str, Producer] = {}

    @property
    def receivers(self) -> list[Receiver]:
        """Of all jobs that ever came."""
        return [receiver for incoming in self.jobs.values() for receiver in incoming.receivers]

    # Asked by the coordinator.

    def reserve(self, job: Job, producer: Producer) -> None:
        """Take blocks into which a producer may write."""
        if job.job_id not in self.jobs:
            self._reserved_at[job.job_id] = producer
            self._enqueue(Incoming(job))

    def decode(self, job: Job, ticket: Ticket, num_delivered: int) -> None:
        """Receive a job's KV, and go on after the tokens delivered."""
        incoming = self.jobs.get(job.job_id)
        if self.world.mode == "pull":
            if incoming is not None:
                return
            incoming = Incoming(job)
        elif incoming is None or incoming.stage != "reserved":
            if incoming is None or incoming.ticket is None:
                error = TransferError(job.job_id, "nothing is reserved for it any more")
                self.clock.call(self.name, None, self.world.on_failed, job, error)
            return
        incoming.ticket, incoming.num_delivered = ticket, num_delivered
        incoming.renewals = [Renewals(ticket.lease_ns) for _ in range(self.tp)]
        if incoming.stage == "reserved":
            self._receive(incoming)
        else:
            self._enqueue(incoming)

    def compute(self, job: Job, num_delivered: int) -> None:
        """Compute all of a job here."""
        if job.job_id not in self.jobs:
            self._enqueue(Incoming(job, num_delivered=num_delivered))

    def abort(self, job_id: str) -> None:
        """Whatever there is of a job."""
        incoming = self.jobs.get(job_id)
        if incoming is None:
            self.jobs[job_id] = Incoming(Job(job_id, 0, 0, 0), stage="over")
            return
        incoming.aborted = True
        match incoming.stage:
            case "queued":
                self._queue.remove(incoming)
                self._release_waiting(incoming)
                incoming.stage = "over"
            case "reserved":
                self._give_up_reservation(incoming)
            case "receiving":
                for receiver in incoming.receivers:
                    receiver.handle(s.Failed("cancelled"))
            case "recovering":
                incoming.stage = "over"
                incoming.taboo = [b for table in incoming.tables for b in table if b]
                self._free_drained(incoming)
            case "decoding":
                self._end(incoming)

    def on_producer_gone(self, producer: Engine) -> None:
        """A life of a producer engine is over, certainly."""
        for table in self.reservations:
            table.on_engine_gone(producer.name, producer.epoch)
        for incoming in tuple(self.jobs.values()):
            for receiver in incoming.receivers:
                if receiver.producer is producer:
                    receiver.handle(s.Failed("producer engine is gone"))
        self._poll()

    # Told by ranks.

    def on_message(self, rank: int, message: bytes) -> None:
        """See Engine."""
        told = decode_push(message)
        if isinstance(told, ArrivedMessage):
            self.reservations[rank].on_arrived(told)
        elif isinstance(told, StoppedMessage):
            self.reservations[rank].on_stopped(told)
        self._poll()

    def on_drained(self, incoming: Incoming, rank: int) -> None:
        """Nothing writes into a job's blocks at a rank any more."""
        incoming.drained.add(rank)
        self._free_drained(incoming)

    def on_verdict(self, incoming: Incoming) -> None:
        """A rank's session is over."""
        if incoming.stage != "receiving" or not all(r.verdict is not None for r in incoming.receivers):
            return
        errors = [r.verdict.error for r in incoming.receivers if r.verdict is not None]
        # A mismatch comes first: somebody may look into it.
        failed = sorted((e for e in errors if e is not None), key=lambda e: not isinstance(e, KVMismatch))
        error = failed[0] if failed else None
        if self.world.mode == "push":
            for rank in range(self.tp):
                self.stop_pushes(incoming, rank)
        if error is None and not incoming.aborted:
            self._go_on(incoming, incoming.job.num_tokens)
        else:
            self._failed(incoming, error)

    def stop_pushes(self, incoming: Incoming, rank: int) -> None:
        """The blocks are wanted back."""
        attempt = incoming.ticket.attempt if incoming.ticket is not None else None
        self.reservations[rank].stop(incoming.job.job_id, self.clock.now, attempt)
        self._poll_clear(rank)

    def tick(self) -> bool:
        """See Engine."""
        now = self.clock.now
        for rank, table in enumerate(self.reservations):
            for ask in table.tick(now):
                producer = self._reserved_at[ask.reservation_id]
                for to in ask.producer_ranks:
                    message = StopMessage(ask.reservation_id, rank, f"{self.name}/{rank}")
                    self.clock.notify(producer, self, producer, to, message.encode(), None)
        for incoming in tuple(self.jobs.values()):
            self._tick_job(incoming, now)
        self._serve()
        waits = any(i.stage not in ("decoding", "over") or i.taboo for i in self.jobs.values())
        return waits or any(table.open_reservations for table in self.reservations)

    def _tick_job(self, incoming: Incoming, now: int) -> None:
        if incoming.stage == "receiving" or incoming.taboo:
            for receiver in incoming.receivers:
                receiver.handle(s.Tick())
        if incoming.stage == "queued" and incoming.ticket is not None:
            self._renew_waiting(incoming)
        if incoming.stage == "queued" and now - incoming.since > BLOCK_WAIT:
            self._queue.remove(incoming)
            self._release_waiting(incoming)
            incoming.stage = "over"
            self._tell_failed(incoming, DeadlineExceeded("waiting for blocks", 0.0))
        if incoming.stage == "reserved" and now - incoming.since > HOLD:
            self._give_up_reservation(incoming)
        if incoming.stage == "recovering" and now - incoming.since > DRAIN_WAIT:
            self._recompute_elsewhere(incoming)

    # Blocks.

    def _enqueue(self, incoming: Incoming) -> None:
        incoming.since = self.clock.now
        incoming.holder = incoming.job.job_id
        self.jobs[incoming.job.job_id] = incoming
        self._queue.append(incoming)
        self._serve()
        self.clock.tick_while_busy(self, TICK)

    def _serve(self) -> None:
        while self._queue and self.clock.now >= self.world.blocks_free_at:
            incoming = self._queue[0]
            tables = self._take(incoming)
            if tables is None:
                return
            self._queue.popleft()
            incoming.tables, incoming.since = tables, self.clock.now
            if incoming.ticket is not None:
                self._receive(incoming)
            elif incoming.job.job_id in self._reserved_at:
                self._reply(incoming)
            else:
                self._go_on(incoming, 0)

    def _take(self, incoming: Incoming) -> Tables | None:
        job = incoming.job
        return self.world.model.take(self.memory, incoming.holder, job.num_tokens, MAX_OUTPUT)

    def _reply(self, incoming: Incoming) -> None:
        job, incoming.stage = incoming.job, "reserved"
        producer = self._reserved_at[job.job_id]
        for rank, table in enumerate(self.reservations):
            table.open(job.job_id, producer.name, producer.epoch, producer.tp)
            for to in range(producer.tp):
                if not set(producer.heads(to)) & set(self.heads(rank)):
                    table.on_stopped(StoppedMessage(job.job_id, to, "it sends nothing here"))
            if not producer.alive:
                table.on_engine_gone(producer.name, producer.epoch)
        sealed = SealedTables.of(incoming.tables, self.memory)
        reserved = Reserved(job.job_id, self.name, self.epoch, sealed)
        self.clock.call(self.name, None, self.world.on_reserved, job, reserved)

    def _give_up_reservation(self, incoming: Incoming) -> None:
        """Nobody will say that it is whole; P may be writing."""
        incoming.stage = "over"
        incoming.taboo = [b for table in incoming.tables for b in table if b]
        for rank in range(self.tp):
            self.stop_pushes(incoming, rank)

    def _free_drained(self, incoming: Incoming) -> None:
        if len(incoming.drained) < self.tp:
            return
        if incoming.stage == "recovering":
            proofs = [receiver.prove() for receiver in incoming.receivers]
            groups = self.world.model.groups
            self._go_on(incoming, longest_valid_prefix(groups, proofs, incoming.job.num_tokens))
        elif incoming.taboo and incoming.looked_into:
            self.memory.give(incoming.job.job_id, incoming.taboo)
            incoming.taboo = []
            self._serve()

    def _end(self, incoming: Incoming) -> None:
        """Of a job that decodes, or is computed here."""
        incoming.stage = "over"
        self.memory.give(incoming.holder, [b for table in incoming.tables for b in table if b])
        self._serve()

    # Receiving.

    def _receive(self, incoming: Incoming) -> None:
        incoming.stage = "receiving"
        ticket = incoming.ticket
        assert ticket is not None
        incoming.receivers = [
            Receiver(self, rank, incoming, incoming.renewals[rank]) for rank in range(self.tp)
        ]
        if not ticket.blocks.is_whole:
            for receiver in incoming.receivers:
                receiver.handle(s.Failed("the ticket was changed under way"))
            return
        for receiver in incoming.receivers:
            receiver.start()
        self._poll()
        self.clock.tick_while_busy(self, TICK)

    def _poll(self) -> None:
        if self.world.mode == "pull":
            return
        for rank in range(self.tp):
            self._poll_clear(rank)
        for incoming in tuple(self.jobs.values()):
            for receiver in incoming.receivers:
                if not receiver.session.is_drained:
                    receiver.poll_arrivals()

    def _poll_clear(self, rank: int) -> None:
        for reservation in self.reservations[rank].take_clear():
            incoming = self.jobs[reservation]
            if incoming.receivers:
                incoming.receivers[rank].stopped_all()
            self.on_drained(incoming, rank)

    def _failed(self, incoming: Incoming, error: RaykError | None) -> None:
        incoming.since = self.clock.now
        if isinstance(error, KVMismatch):
            incoming.looked_into = False
            self.clock.at(LOOK, self._looked_into, incoming)
        if self.world.policy == "recompute" and not incoming.aborted:
            incoming.stage = "recovering"
            self.world.note_recovery(incoming.job)
        else:
            incoming.stage = "over"
            incoming.taboo = [b for table in incoming.tables for b in table if b]
            if error is not None:
                self._tell_failed(incoming, error)
        self._free_drained(incoming)

    def _looked_into(self, incoming: Incoming) -> None:
        if not self.runs:
            return
        incoming.looked_into = True
        for receiver in incoming.receivers:
            if receiver.ticket.lease_id in receiver.producer.released:
                self.clock.violate(f"{receiver.ticket.lease_id} was released before anybody looked into it")
            receiver.release()
        self._free_drained(incoming)

    def _recompute_elsewhere(self, incoming: Incoming) -> None:
        """What is in flight has the blocks until it ends."""
        if not incoming.taboo:
            self.clock.log(f"{self.name}: {incoming.job.job_id} leaves its blocks to what is in flight")
            incoming.taboo = [b for table in incoming.tables for b in table if b]
        incoming.holder = f"{incoming.job.job_id}, again"
        tables = self._take(incoming)
        if tables is not None:
            incoming.tables = tables
            self._go_on(incoming, 0)

    def _tell_failed(self, incoming: Incoming, error: RaykError) -> None:
        self.clock.call(self.name, None, self.world.on_failed, incoming.job, error)

    def _renew_waiting(self, incoming: Incoming) -> None:
        assert incoming.ticket is not None
        for rank, renewals in enumerate(incoming.renewals):
            if renewals.is_due(self.clock.now):
                ranks = self._told_by(rank, incoming.ticket)
                tell(self, rank, incoming.ticket, ranks, "lease_renewal", renewals.num_sent)

    def _release_waiting(self, incoming: Incoming) -> None:
        if incoming.ticket is not None:
            for rank in range(self.tp):
                tell(self, rank, incoming.ticket, self._told_by(rank, incoming.ticket), "free", 0)

    def _told_by(self, rank: int, ticket: Ticket) -> tuple[int, ...]:
        producer = self.world.producer_of(ticket)
        return tuple(p for p in range(producer.tp) if set(producer.heads(p)) & set(self.heads(rank)))

    # Decoding.

    def _go_on(self, incoming: Incoming, num_valid: int) -> None:
        """Compute what of the prompt is not here, then decode."""
        incoming.stage = "decoding"
        self.world.note_valid(incoming.job, num_valid)
        self.clock.log(f"{self.name}: {incoming.job.job_id} goes on with {num_valid} tokens of KV")
        delay = STEP * (1 + (num_valid < incoming.job.num_tokens))
        self.clock.at(delay, self._compute_prompt, incoming, num_valid)

    def _compute_prompt(self, incoming: Incoming, num_valid: int) -> None:
        if not self.runs or incoming.stage != "decoding":
            return
        job = incoming.job
        if num_valid < job.num_tokens:
            right = self._is_right(incoming, num_valid)
            live = self.world.model.live_rows(1, job.num_tokens)
            self._write(incoming, 0, range(num_valid, job.num_tokens), right)
            self._write(incoming, 1, range(max(num_valid, live.start), job.num_tokens), right)
        self._decode(incoming)

    def _decode(self, incoming: Incoming) -> None:
        if not self.runs or incoming.stage != "decoding":
            return
        job, index = incoming.job, incoming.num_delivered
        # Token `index` comes after the prompt and the tokens before it; earlier ones are stored by now.
        right = self._catch_up(incoming, job.num_tokens + index)
        token = right_token(job.prompt, index) if right else WRONG_TOKEN
        incoming.num_delivered += 1
        self.clock.call(self.name, None, self.world.on_tokens, job, index, (token,))
        if incoming.num_delivered < MAX_OUTPUT:
            self.clock.at(STEP, self._decode, incoming)
        else:
            self.clock.call(self.name, None, self.world.on_finished, job)
            self._end(incoming)

    def _catch_up(self, incoming: Incoming, num_tokens: int) -> bool:
        """Compute the rows, up to `num_tokens`, that are not here yet; whether all that went into them, and
        so into the next token, was right."""
        first = max(incoming.stored, incoming.job.num_tokens)
        right = self._is_right(incoming, first)
        for layer in (0, 1):
            self._write(incoming, layer, range(first, num_tokens), right)
        incoming.stored = num_tokens
        return right

    def _is_right(self, incoming: Incoming, num_tokens: int) -> bool:
        """Whether every row that the next token sees is what it must be."""
        model, prompt = self.world.model, incoming.job.prompt
        rows = self.memory.rows
        for layer in (0, 1):
            table = incoming.tables[layer]
            for head in HEADS:
                right = right_rows(prompt, layer, head)
                for index, first, stop, at in model.pieces(layer, num_tokens):
                    if rows(layer, head, table[index])[first:stop] != right[at : at + stop - first]:
                        return False
        return True

    def _write(self, incoming: Incoming, layer: int, positions: range, right: bool) -> None:
        model, prompt = self.world.model, incoming.job.prompt
        for position in positions:
            index, row = model.place(layer, position)
            for head in HEADS:
                value = right_rows(prompt, layer, head)[position] if right else WRONG
                place = layer, head, incoming.tables[layer][index]
                self.memory.write(incoming.holder, place, row, (value,))
