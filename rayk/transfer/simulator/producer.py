"""A producer engine: it computes prompts, pushes them where it may, and lends their blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from rayk.transfer import push_session as p
from rayk.transfer.lease import LeaseTable, ReleaseMessage, RenewMessage
from rayk.transfer.push_messages import ArrivedMessage, StopMessage, StoppedMessage, decode_push
from rayk.transfer.reservation_state import StoppedTable
from rayk.transfer.simulator.core import Engine, Flight
from rayk.transfer.simulator.memory import BLOCK_SIZE, HEADS, Memory, Row
from rayk.transfer.simulator.requests import (
    Job,
    Reserved,
    SealedTables,
    Tables,
    Ticket,
    right_rows,
    right_token,
)
from rayk.types.errors import TransferError

if TYPE_CHECKING:
    from rayk.transfer.simulator.consumer import Consumer
    from rayk.transfer.simulator.world import World

LEASE = 45
"""Length of a lease after a renewal."""
LEASE_DEADLINE = 700
PUSH_DEADLINE = 400
TICK = 7
CHUNK = 6
"""A chunk of a prompt takes 1 to this long."""
MAX_CHUNKS = 4
MAX_PREEMPTIONS = 3
PREEMPTED = 0.3
"""Share of pushed prompts of several chunks that are preempted, once or more often."""


@dataclass(eq=False, slots=True)
class Run:
    """A prompt being computed."""

    job: Job
    reserved: Reserved | None
    tables: Tables
    chunks: list[tuple[int, int]]
    preempt_after: list[int]
    """Chunk after which the scheduler takes its blocks, one per attempt that it does not let finish."""
    attempt: int = 0


@dataclass(eq=False, slots=True)
class Lent:
    """Blocks under a lease."""

    job: Job
    blocks: list[int]
    told: set[int] = field(default_factory=set)


class Producer(Engine):
    """See the module."""

    role = "prefill"

    def __init__(self, world: World, name: str, epoch: int, tp: int, memory: Memory) -> None:
        super().__init__(world, name, epoch, tp, memory)
        self.world = world
        self.leases = [LeaseTable() for _ in range(tp)]
        self.pushes: dict[tuple[str, int, int], Push] = {}
        """(reservation, rank, consumer rank)."""
        self._stopped = [StoppedTable() for _ in range(tp)]
        self._known: set[str] = set()
        self._waiting: deque[tuple[Job, Reserved | None]] = deque()
        self._running: dict[str, Run] = {}
        self._lent: dict[str, Lent] = {}
        self.released: set[str] = set()
        """Leases that ended because consumers said so."""

    def prefill(self, job: Job, reserved: Reserved | None) -> None:
        """Compute a prompt; the coordinator hears of its first token and its ticket."""
        if job.job_id in self._known:
            return
        self._known.add(job.job_id)
        if reserved is not None and not reserved.blocks.is_whole:
            error = TransferError(job.job_id, "the reservation was changed under way")
            self.clock.call(self.name, None, self.world.on_failed, job, error)
            return
        self._waiting.append((job, reserved))
        self._begin()

    def abort(self, job_id: str) -> None:
        """Whatever there is of a job."""
        self._known.add(job_id)
        self._waiting = deque(w for w in self._waiting if w[0].job_id != job_id)
        run = self._running.pop(job_id, None)
        for push in self.pushes.values():
            if push.run.job.job_id == job_id:
                push.handle(p.Failed("aborted"))
        if run is not None:
            self._free(run.job, [b for table in run.tables for b in table if b])
        for lease_id in [i for i, lent in self._lent.items() if lent.job.job_id == job_id]:
            self._end_lease(lease_id)

    def on_consumer_gone(self, consumer: Engine) -> None:
        """A life of a consumer engine is over."""
        for push in self.pushes.values():
            if push.consumer is consumer:
                push.handle(p.Failed("consumer engine is gone"))

    def on_message(self, rank: int, message: bytes) -> None:
        """See Engine."""
        release = ReleaseMessage.decode(message)
        if release is not None:
            self.leases[rank].on_release(release)
            return
        renewal = RenewMessage.decode(message)
        if renewal is not None:
            self.leases[rank].on_renew(renewal, self.clock.now)
            return
        stop = decode_push(message)
        if isinstance(stop, StopMessage):
            self._stop(rank, stop)

    def tick(self) -> bool:
        """See Engine."""
        now = self.clock.now
        for rank, table in enumerate(self.leases):
            for lease_id in table.take_released():
                lent = self._lent.get(lease_id)
                if lent is not None:
                    lent.told.add(rank)
                    if len(lent.told) == self.tp:
                        self.released.add(lease_id)
                        self._end_lease(lease_id)
            for lease_id in table.expire(now):
                if lease_id in self._lent:
                    self.clock.log(f"{self.name}: lease {lease_id} has ended by itself at rank {rank}")
                    self._end_lease(lease_id)
        pushing = [push for push in self.pushes.values() if not push.session.is_drained]
        for push in pushing:
            push.handle(p.Tick())
        return bool(self._lent or pushing or any(table.open_leases for table in self.leases))

    def _begin(self) -> None:
        while self._waiting:
            job, reserved = self._waiting[0]
            tables = self.world.model.take(self.memory, job.job_id, job.num_tokens, 0)
            if tables is None:
                return
            self._waiting.popleft()
            chunks = self._chunks(job.num_tokens)
            run = Run(job, reserved, tables, chunks, self._preemptions(len(chunks)) if reserved else [])
            self._running[job.job_id] = run
            if reserved is not None:
                self._open_pushes(run, reserved)
            self.clock.at(1 + int(self.clock.random.random() * CHUNK), self._compute, run, 0)

    def _chunks(self, num_tokens: int) -> list[tuple[int, int]]:
        draw = self.clock.random.random
        cuts = {int(draw() * num_tokens) for _ in range(int(draw() * MAX_CHUNKS))} - {0}
        return list(pairwise((0, *sorted(cuts), num_tokens)))

    def _preemptions(self, num_chunks: int) -> list[int]:
        """After the last chunk a prompt is handed over: it is not preempted there."""
        draw = self.clock.random.random
        if num_chunks == 1 or draw() >= PREEMPTED:
            return []
        return [int(draw() * (num_chunks - 1)) for _ in range(1 + int(draw() * MAX_PREEMPTIONS))]

    def _open_pushes(self, run: Run, reserved: Reserved) -> None:
        consumer = self.world.consumer_of(reserved)
        layers = 1 + int(self.clock.random.random() * 2)
        for rank in range(self.tp):
            if reserved.reservation_id in self._stopped[rank]:
                continue
            for to in range(consumer.tp):
                heads = [h for h in self.heads(rank) if h in consumer.heads(to)]
                if heads:
                    push = Push(self, consumer, rank, to, heads, run, reserved, layers)
                    self.pushes[reserved.reservation_id, rank, to] = push
        self.clock.tick_while_busy(self, TICK)

    def _compute(self, run: Run, index: int) -> None:
        if not self.runs or self._running.get(run.job.job_id) is not run:
            return
        start, stop = run.chunks[index]
        is_last = index == len(run.chunks) - 1
        self._write_rows(run, start, stop, is_last)
        pushes = [push for push in self.pushes.values() if push.run is run]
        for layer in (0, 1):
            for push in pushes:
                push.handle(p.LayersComputed((layer,), start, stop, is_last))
        if run.preempt_after[run.attempt : run.attempt + 1] == [index]:
            self._preempt(run, pushes)
            index = -1
        elif is_last:
            self._hand_over(run)
            return
        self.clock.at(1 + int(self.clock.random.random() * CHUNK), self._compute, run, index + 1)

    def _preempt(self, run: Run, pushes: list[Push]) -> None:
        self.clock.log(f"{self.name}: {run.job.job_id} is preempted")
        self.world.num_preempted += 1
        run.attempt += 1
        for push in pushes:
            push.handle(p.Preempted())
        self.memory.give(run.job.job_id, [b for table in run.tables for b in table if b])
        tables = self.world.model.take(self.memory, run.job.job_id, run.job.num_tokens, 0)
        assert tables is not None, "its own blocks are free again"
        run.tables = tables

    def _write_rows(self, run: Run, start: int, stop: int, is_last: bool) -> None:
        job, model = run.job, self.world.model
        live = model.live_rows(1, job.num_tokens)
        for layer in (0, 1):
            early = layer not in model.late_layers
            positions = range(start, stop) if early else live if is_last else range(0)
            for position in positions:
                index, row = model.place(layer, position)
                block = run.tables[layer][index]
                for head in HEADS:
                    value = right_rows(job.prompt, layer, head)[position]
                    self.memory.write(job.job_id, (layer, head, block), row, (value,))

    def _hand_over(self, run: Run) -> None:
        job = run.job
        if not self.runs:
            return  # a fault has struck while it pushed
        del self._running[job.job_id]
        lease_id = f"{self.name}/{self.epoch}/{job.job_id}"
        for table in self.leases:
            table.open(lease_id, self.clock.now + LEASE_DEADLINE, now_ns=self.clock.now, lease_ns=LEASE)
        self._lent[lease_id] = Lent(job, [b for table in run.tables for b in table if b])
        sealed = SealedTables.of(run.tables, self.memory)
        digests = {
            (layer, head): read_rows(self.world, self.memory, run.tables, layer, head, job.num_tokens)
            for layer in (0, 1)
            for head in HEADS
        }
        ticket = Ticket(job, lease_id, self.name, self.epoch, sealed, digests, LEASE, run.attempt)
        self.clock.log(f"{self.name}: {job.job_id} is computed; ticket of attempt {run.attempt}")
        self.clock.call(self.name, None, self.world.on_prefilled, job, right_token(job.prompt, 0), ticket)
        self.clock.tick_while_busy(self, TICK)

    def _end_lease(self, lease_id: str) -> None:
        lent = self._lent.pop(lease_id)
        self._free(lent.job, lent.blocks)

    def _free(self, job: Job, blocks: list[int]) -> None:
        self.memory.give(job.job_id, blocks)
        self._begin()

    def _stop(self, rank: int, message: StopMessage) -> None:
        self._stopped[rank].stop(message.reservation_id)
        push = self.pushes.get((message.reservation_id, rank, message.consumer_rank))
        if push is not None:
            was_over = push.session.is_drained
            push.handle(p.Failed("the consumer wants its blocks back"))
            if not was_over:
                return  # it is told when it has drained
            consumer = push.consumer
        else:
            consumer = self.world.consumer
        answer = StoppedMessage(message.reservation_id, rank)
        self.clock.notify(self, consumer, consumer, message.consumer_rank, answer.encode(), None)


class Push:
    """Carries out the push of one job from a rank to a consumer rank."""

    def __init__(
        self,
        producer: Producer,
        consumer: Consumer,
        rank: int,
        to: int,
        heads: list[int],
        run: Run,
        reserved: Reserved,
        layers_per_write: int,
    ) -> None:
        self.producer = producer
        self.consumer = consumer
        self.run = run
        self._rank = rank
        self._to = to
        self._heads = heads
        self._reserved = reserved
        self._flights: dict[int, Flight] = {}
        self._why = ""
        self.session = p.PushSession(
            run.job.job_id,
            num_layers=2,
            late_layers=producer.world.model.late_layers,
            layers_per_write=layers_per_write,
            deadline_ns=producer.clock.now + PUSH_DEADLINE,
        )

    def handle(self, event: p.Event) -> None:
        """Have the session take note, and do what it says."""
        clock = self.producer.clock
        todo = deque(self.session.handle(event, clock.now))
        while todo and self.producer.runs:
            for caused in self._carry_out(todo.popleft()):
                todo.extend(self.session.handle(caused, clock.now))

    def _carry_out(self, action: p.Action) -> list[p.Event]:
        clock = self.producer.clock
        match action:
            case p.PostWrite():
                self._post(action)
            case p.NotifyArrived(attempt, num_writes):
                arrived = ArrivedMessage(self._reserved.reservation_id, attempt, self._rank, num_writes)
                clock.notify(
                    self.producer, self.consumer, self.consumer, self._to, arrived.encode(), "notify"
                )
            case p.Cancel(writes):
                ended = [w for w in writes if w in self._flights and self._flights[w].cancel()]
                for write in ended:
                    del self._flights[write]
                return [p.WriteEnded(write, "cancelled") for write in ended]
            case p.Finish(error, _):
                self._why = str(error)
            case p.Drained():
                clock.log(f"{self.producer.name} rank {self._rank}: push drained: {self._why}")
                stopped = StoppedMessage(self._reserved.reservation_id, self._rank, self._why)
                clock.notify(self.producer, self.consumer, self.consumer, self._to, stopped.encode(), None)
        return []

    def _are_computed(self, layer: int, positions: range) -> bool:
        """Whether the rows of all of them are what they must be."""
        place, rows = self.producer.world.model.place, self.producer.memory.rows
        table = self.run.tables[layer]
        for head in self._heads:
            right = right_rows(self.run.job.prompt, layer, head)
            for position in positions:
                index, row = place(layer, position)
                if rows(layer, head, table[index])[row] != right[position]:
                    return False
        return True

    def _post(self, action: p.PostWrite) -> None:
        world, job = self.producer.world, self.run.job
        copies = []
        for layer in action.layers:
            live = world.model.live_rows(layer, job.num_tokens)
            positions = range(max(action.start, live.start), action.stop)
            if not self._are_computed(layer, positions):
                world.violate(f"{job.job_id}: a write of rows that are not computed: {action}")
            # A block goes once, when its last live row is there.
            ends = {
                world.model.place(layer, position)[0]
                for position in positions
                if position == live.stop - 1 or (position + 1) % BLOCK_SIZE == 0
            }
            for index in sorted(ends):
                source, target = self.run.tables[layer][index], self._reserved.blocks.tables[layer][index]
                copies += [((layer, h, source), (layer, h, target)) for h in self._heads]
        write = action.write

        def done(is_ok: bool) -> None:
            self._flights.pop(write, None)
            self.handle(p.WriteDone(write) if is_ok else p.WriteEnded(write, "a write failed"))

        flight = Flight(
            self.producer.clock,
            self.producer,
            self.consumer,
            self.producer,
            self._reserved.reservation_id,
            copies,
            ("post", "mid_transfer") if copies else (None, None),
            done,
        )
        self._flights[write] = flight
        flight.post()


def read_rows(
    world: World, memory: Memory, tables: Tables, layer: int, head: int, num_tokens: int
) -> tuple[Row, ...]:
    """Live rows of a layer and head."""
    found: list[Row] = []
    for index, first, stop, _ in world.model.pieces(layer, num_tokens):
        found += memory.rows(layer, head, tables[layer][index])[first:stop]
    return tuple(found)
