"""A consumer engine: it takes blocks, receives KV, and decodes only what is proven or computed here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayk.transfer.consumer import TransferOutcome, refusal
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.push_reservations import Reserved
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.transfer.ticket_seal import sealed
from rayk.transfer.valid_prefix import LayerProof, longest_valid_prefix
from rayk.types.errors import DeadlineExceeded, KVMismatch, RaykError, TransferError
from tests.transfer.simulator.core import UNIT_NS, Engine
from tests.transfer.simulator.memory import WRONG, Memory, Tables
from tests.transfer.simulator.producer import TICK, Producer
from tests.transfer.simulator.ranks import descriptions, make_ranks
from tests.transfer.simulator.requests import (
    HEADS,
    LAYERS,
    MAX_OUTPUT,
    WRONG_TOKEN,
    Job,
    right_rows,
    right_token,
)

if TYPE_CHECKING:
    from tests.transfer.simulator.world import World

TRANSFER_DEADLINE = 110
BLOCK_WAIT = 200
HOLD = 200
"""A reservation waits so long for its ticket."""
PUSH_DEADLINE = 400
LOOK = 15
"""Somebody looks into a mismatch for so long."""
DRAIN_WAIT = 40
"""To be recomputed in the same blocks, a request waits so long for what is in flight."""
STEP = 3


@dataclass(eq=False, slots=True)
class Incoming:
    """A job here."""

    job: Job
    ticket: TransferTicket | None = None
    num_delivered: int = 0
    stage: str = "queued"
    """queued, reserving, reserved, receiving, recovering, decoding or over."""
    since: int = 0
    tables: Tables = ()
    holder: str = ""
    is_waiting: bool = False
    """Whether all ranks renew the lease of its ticket, which waits for blocks."""
    reserved: dict[int, Reserved] = field(default_factory=dict)
    deadline: int = 0
    """Of the transfer."""
    outcomes: dict[int, TransferOutcome] = field(default_factory=dict)
    """By rank."""
    finished_at: dict[int, int] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    """Ranks where nothing writes into its blocks any more."""
    stored: int = 0
    """Positions before this one have rows here."""
    is_aborted: bool = False
    is_looked_into: bool = True
    in_flight: Tables = ()
    """Blocks that somebody may still write into, held under the job's own name."""


class Consumer(Engine):
    role = "decode"

    def __init__(self, world: World, name: str, epoch: int, tp: int, memory: Memory) -> None:
        super().__init__(world, name, epoch, tp, memory)
        self.world = world
        self.ranks = make_ranks(self, world.network)
        self.jobs: dict[str, Incoming] = {}
        self._queue: deque[Incoming] = deque()
        self._reserved_at: dict[str, Producer] = {}

    def connect(self, producers: Sequence[CacheDescription]) -> None:
        """Take requests of a prefill engine. Raises HandshakeMismatch."""
        mine = descriptions(self.ranks)
        for rank in self.ranks:
            rank.connect(producers, mine)

    # Asked by the coordinator.

    def reserve(self, job: Job, producer: Producer) -> None:
        """Take blocks into which a producer may write."""
        if job.job_id not in self.jobs:
            self._reserved_at[job.job_id] = producer
            self._enqueue(Incoming(job))

    def decode(self, job: Job, ticket: TransferTicket, num_delivered: int) -> None:
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
        incoming.is_aborted = True
        match incoming.stage:
            case "queued":
                self._turn_away(incoming)
            case "reserving" | "reserved":
                self._give_up_reservation(incoming)
            case "receiving":
                for rank in self.ranks:
                    rank.cancel(job_id)
                self.wake()
            case "recovering":
                incoming.stage = "over"
                incoming.in_flight = incoming.in_flight or incoming.tables
                self._free_drained(incoming)
            case "decoding":
                self._end(incoming)

    def on_producer_gone(self, producer: Engine) -> None:
        """A life of a producer engine is over, certainly."""
        for rank in self.ranks:
            rank.end_reads(producer.name, producer.epoch)
        self.wake()

    # Told by ranks.

    def turn(self) -> None:
        for index, rank in enumerate(self.ranks):
            outcomes = rank.poll(self.clock.now_ns)
            if not self.runs:
                return
            for outcome in outcomes:
                self._on_outcome(index, outcome)
            for lease_id in rank.drained():
                for incoming in tuple(self.jobs.values()):
                    if incoming.ticket is not None and incoming.ticket.lease_id == lease_id:
                        self._on_drained(incoming, index)
            for reservation_id in rank.cleared():
                if self.jobs[reservation_id].ticket is None:  # else its transfer says so
                    self._on_drained(self.jobs[reservation_id], index)
            for part in rank.reserved():
                self._on_reserved(self.jobs[part.reservation_id], index, part)

    def _on_outcome(self, rank: int, outcome: TransferOutcome) -> None:
        incoming = self.jobs[outcome.request_id]
        if rank in incoming.outcomes:
            self.clock.violate(f"{outcome.request_id} finished twice on rank {rank}")
        incoming.outcomes[rank] = outcome
        incoming.finished_at[rank] = self.clock.now
        self.clock.log(f"{self.name} rank {rank}: {outcome.request_id}: {outcome.error or 'proven'}")
        if not outcome.is_draining:
            incoming.drained.add(rank)
        if incoming.stage == "receiving" and len(incoming.outcomes) == self.tp:
            self._on_verdict(incoming)

    def _on_verdict(self, incoming: Incoming) -> None:
        errors = [outcome.error for outcome in incoming.outcomes.values() if outcome.error is not None]
        # A mismatch comes first: somebody may look into it.
        error = min(errors, key=lambda e: not isinstance(e, KVMismatch), default=None)
        if error is None and not incoming.is_aborted:
            self._go_on(incoming, incoming.job.num_tokens)
        else:
            self._failed(incoming, error)

    def _on_drained(self, incoming: Incoming, rank: int) -> None:
        incoming.drained.add(rank)
        self._free_drained(incoming)

    def tick(self) -> bool:
        self.turn()
        if not self.runs:
            return False
        for incoming in tuple(self.jobs.values()):
            self._tick_job(incoming, self.clock.now)
        self._serve()
        return any(i.stage not in ("decoding", "over") or i.in_flight for i in self.jobs.values())

    def _tick_job(self, incoming: Incoming, now: int) -> None:
        if incoming.stage == "queued" and now - incoming.since > BLOCK_WAIT:
            self._turn_away(incoming)
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
        if incoming.stage == "queued" and incoming.ticket is not None:
            self._wait_for_blocks(incoming)
        self.clock.tick_while_busy(self, TICK)

    def _wait_for_blocks(self, incoming: Incoming) -> None:
        assert incoming.ticket is not None
        incoming.is_waiting = True
        for rank in self.ranks:
            rank.hold(incoming.ticket)

    def _turn_away(self, incoming: Incoming) -> None:
        self._queue.remove(incoming)
        if incoming.ticket is not None:
            for rank in self.ranks:
                rank.let_go(incoming.job.job_id)
        incoming.stage = "over"

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
                self._reserve(incoming)
            else:
                self._go_on(incoming, 0)

    def _take(self, incoming: Incoming) -> Tables | None:
        counts = self.memory.model.counts(incoming.job.num_tokens, MAX_OUTPUT)
        return self.memory.take(incoming.holder, counts)

    def _reserve(self, incoming: Incoming) -> None:
        job, incoming.stage = incoming.job, "reserving"
        producer = self._reserved_at[job.job_id]
        for rank in self.ranks:
            rank.reserve(job.job_id, producer.name, incoming.tables, job.num_tokens)
            if not producer.alive:
                rank.end_reads(producer.name, producer.epoch)
        self.wake()

    def _on_reserved(self, incoming: Incoming, rank: int, part: Reserved) -> None:
        incoming.reserved[rank] = part
        if incoming.stage != "reserving" or len(incoming.reserved) < self.tp:
            return
        job, incoming.stage = incoming.job, "reserved"
        reservation = Reservation(
            request_id=job.job_id,
            reservation_id=job.job_id,
            engine=self.name,
            epoch=self.epoch,
            num_tokens=job.num_tokens,
            block_tables=incoming.tables,
            generations=part.generations,
            hold_s=PUSH_DEADLINE * UNIT_NS / 1e9,
        )
        self.clock.call(self.name, None, self.world.on_reserved, job, sealed(reservation))

    def _give_up_reservation(self, incoming: Incoming) -> None:
        """Nobody will say that it is whole; P may be writing."""
        incoming.stage = "over"
        incoming.in_flight = incoming.tables
        for rank in self.ranks:
            rank.end_reservation(incoming.job.job_id)
        self.wake()

    def _free_drained(self, incoming: Incoming) -> None:
        if len(incoming.drained) < self.tp:
            return
        if incoming.stage == "recovering":
            self._go_on(incoming, self._num_proven(incoming))
        elif incoming.in_flight and incoming.is_looked_into:
            self.memory.give(incoming.job.job_id, incoming.in_flight)
            incoming.in_flight = ()
            self._serve()

    def _num_proven(self, incoming: Incoming) -> int:
        assert incoming.ticket is not None
        proofs: list[list[LayerProof]] = []
        for rank in self.ranks:
            try:
                proofs.append(rank.proofs(incoming.ticket, incoming.tables))
            except TransferError:
                proofs.append([])  # the ticket proves nothing
        return longest_valid_prefix(self.memory.model.groups, proofs, incoming.job.num_tokens)

    def _end(self, incoming: Incoming) -> None:
        """Of a job that decodes, or is computed here."""
        incoming.stage = "over"
        self.memory.give(incoming.holder, incoming.tables)
        self._serve()

    # Receiving.

    def _receive(self, incoming: Incoming) -> None:
        incoming.stage = "receiving"
        ticket, job_id = incoming.ticket, incoming.job.job_id
        assert ticket is not None
        incoming.deadline = self.clock.now + TRANSFER_DEADLINE
        for index, rank in enumerate(self.ranks):
            try:
                rank.start(ticket, incoming.tables, incoming.deadline * UNIT_NS)
            except RaykError as error:
                if ticket.reservation_id is not None:
                    rank.end_reservation(job_id)
                self._on_outcome(index, refusal(ticket, error))
            if not self.runs:
                return
        self.wake()
        self.clock.tick_while_busy(self, TICK)

    def _failed(self, incoming: Incoming, error: RaykError | None) -> None:
        incoming.since = self.clock.now
        is_recovered = self.world.policy == "recompute" and not incoming.is_aborted
        if isinstance(error, KVMismatch):
            if is_recovered:
                self._release_mismatch(incoming)
            else:
                incoming.is_looked_into = False
                self.clock.at(LOOK, self._looked_into, incoming)
        if is_recovered:
            incoming.stage = "recovering"
            self.world.note_recovery(incoming.job)
        else:
            incoming.stage = "over"
            incoming.in_flight = incoming.tables
            if error is not None:
                self._tell_failed(incoming, error)
        self._free_drained(incoming)
        self.clock.tick_while_busy(self, TICK)

    def _looked_into(self, incoming: Incoming) -> None:
        if not self.runs:
            return
        incoming.is_looked_into = True
        ticket = incoming.ticket
        assert ticket is not None
        producer = self.world.producer_of(ticket)
        if ticket.lease_id in producer.released and self.clock.now < incoming.deadline:
            self.clock.violate(f"{ticket.lease_id} was released before anybody looked into it")
        self._release_mismatch(incoming)
        self._free_drained(incoming)

    def _release_mismatch(self, incoming: Incoming) -> None:
        for rank in self.ranks:
            rank.release_now(incoming.job.job_id)

    def _recompute_elsewhere(self, incoming: Incoming) -> None:
        """What is in flight has the blocks until it ends."""
        if not incoming.in_flight:
            self.clock.log(f"{self.name}: {incoming.job.job_id} leaves its blocks to what is in flight")
            incoming.in_flight = incoming.tables
        incoming.holder = f"{incoming.job.job_id}, again"
        tables = self._take(incoming)
        if tables is not None:
            incoming.tables = tables
            self._go_on(incoming, 0)

    def _tell_failed(self, incoming: Incoming, error: RaykError) -> None:
        self.clock.call(self.name, None, self.world.on_failed, incoming.job, error)

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
            live = self.memory.model.live_rows(1, job.num_tokens)
            self._write(incoming, 0, range(num_valid, job.num_tokens), right=right)
            self._write(incoming, 1, range(max(num_valid, live.start), job.num_tokens), right=right)
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
        for layer in LAYERS:
            self._write(incoming, layer, range(first, num_tokens), right=right)
        incoming.stored = num_tokens
        return right

    def _is_right(self, incoming: Incoming, num_tokens: int) -> bool:
        """Whether every row that the next token sees is what it must be."""
        model, prompt = self.memory.model, incoming.job.prompt
        for layer in LAYERS:
            table = incoming.tables[model.group(layer)]
            for index, row, at, stop in model.pieces(layer, model.live_rows(layer, num_tokens)):
                for head in HEADS:
                    right = right_rows(prompt, layer, head)[at:stop]
                    if not self.memory.holds(layer, head, table[index], row, right):
                        return False
        return True

    def _write(self, incoming: Incoming, layer: int, positions: range, *, right: bool) -> None:
        model, prompt = self.memory.model, incoming.job.prompt
        table = incoming.tables[model.group(layer)]
        for index, row, at, stop in model.pieces(layer, positions):
            for head in HEADS:
                values = right_rows(prompt, layer, head)[at:stop]
                place = layer, head, table[index], row
                self.memory.write(incoming.holder, *place, values if right else values * 0 + WRONG)
