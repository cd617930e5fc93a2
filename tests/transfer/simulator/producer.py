"""A producer engine: it computes prompts, pushes them where it may, and lends their blocks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from rayk.transfer.handshake import CacheDescription
from rayk.transfer.push import Chunk
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.transfer.ticket_seal import sealed
from tests.transfer.simulator.core import UNIT_NS, Engine
from tests.transfer.simulator.memory import Memory, Tables
from tests.transfer.simulator.ranks import descriptions, make_pushers, make_ranks
from tests.transfer.simulator.requests import HEADS, LAYERS, Job, right_rows, right_token

if TYPE_CHECKING:
    from tests.transfer.simulator.world import World

LEASE = 45
"""Length of a lease after a renewal."""
LEASE_DEADLINE = 700
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
    reservation: Reservation | None
    tables: Tables
    chunks: list[tuple[int, int]]
    preempt_after: list[int]
    """Chunk after which the scheduler takes its blocks, one per attempt that it does not let finish."""
    attempt: int = 0


@dataclass(eq=False, slots=True)
class Lent:
    """Blocks under a lease."""

    job: Job
    tables: Tables
    told: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Leaving:
    """Blocks that are given back once nothing is pushed from them."""

    job: Job
    tables: Tables
    is_free: list[threading.Event]
    again: Run | None = None
    """The prompt that was preempted, and is computed again then."""


class Producer(Engine):
    role = "prefill"

    def __init__(self, world: World, name: str, epoch: int, tp: int, memory: Memory) -> None:
        super().__init__(world, name, epoch, tp, memory)
        self.world = world
        self.ranks = make_ranks(self, world.network)
        self.pushers = []
        if world.mode == "push":
            layers = 1 + int(world.random.random() * 2)
            self.pushers = make_pushers(self, world.network, self.ranks, layers)
        self._known: set[str] = set()
        self._waiting: deque[tuple[Job, Reservation | None]] = deque()
        self._running: dict[str, Run] = {}
        self._leaving: list[Leaving] = []
        self._lent: dict[str, Lent] = {}
        self.released: set[str] = set()
        """Leases that ended because consumers said so."""

    def connect(self, consumers: Sequence[CacheDescription]) -> None:
        """Serve a decode engine from now on."""
        mine = descriptions(self.ranks)
        for rank in self.ranks:
            rank.connect(mine, consumers)
        for pusher in self.pushers:
            pusher.connect(mine, consumers)

    def prefill(self, job: Job, reservation: Reservation | None) -> None:
        """Compute a prompt; the coordinator hears of its first token and its ticket."""
        if job.job_id not in self._known:
            self._known.add(job.job_id)
            self._waiting.append((job, reservation))
            self._begin()

    def abort(self, job_id: str) -> None:
        """Whatever there is of a job."""
        self._known.add(job_id)
        self._waiting = deque(w for w in self._waiting if w[0].job_id != job_id)
        run = self._running.pop(job_id, None)
        for pusher in self.pushers:
            pusher.end(job_id, "aborted")
        preempted = next((left for left in self._leaving if left.again is run), None)
        if run is not None and preempted is not None:
            preempted.again = None
        elif run is not None:
            self._free(run.job, run.tables)
        for lease_id in [i for i, lent in self._lent.items() if lent.job.job_id == job_id]:
            self._end_lease(lease_id)
        self.wake()

    def turn(self) -> None:
        for index, rank in enumerate(self.ranks):
            rank.poll(self.clock.now_ns)
            for lease_id in rank.released():
                lent = self._lent.get(lease_id)
                if lent is not None:
                    lent.told.add(index)
                    if len(lent.told) == self.tp:
                        self.released.add(lease_id)
                        self._end_lease(lease_id)
            for lease_id in rank.expired(self.clock.now_ns):
                if lease_id in self._lent:
                    self.clock.log(f"{self.name}: lease {lease_id} has ended by itself at rank {index}")
                    self._end_lease(lease_id)
            if self.pushers:
                for stop in rank.stops():
                    self.pushers[index].stop(stop)
        for pusher in self.pushers:
            if not self.runs:
                return  # a fault has struck while it pushed
            pusher.turn()
            pusher.check()
        if self.runs:
            self._give_left()

    def tick(self) -> bool:
        self.turn()
        is_pushing = any(pusher.num_pushing for pusher in self.pushers)
        return bool(self._lent or self._leaving or is_pushing)

    def _begin(self) -> None:
        while self._waiting:
            job, reservation = self._waiting[0]
            tables = self.memory.take(job.job_id, self.memory.model.counts(job.num_tokens, 0))
            if tables is None:
                return
            self._waiting.popleft()
            chunks = self._chunks(job.num_tokens)
            preemptions = self._preemptions(len(chunks)) if reservation else []
            run = Run(job, reservation, tables, chunks, preemptions)
            self._running[job.job_id] = run
            self._compute_later(run, 0)
            self.clock.tick_while_busy(self, TICK)

    def _compute_later(self, run: Run, index: int) -> None:
        self.clock.at(1 + int(self.clock.random.random() * CHUNK), self._compute, run, index)

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

    def _compute(self, run: Run, index: int) -> None:
        if not self.runs or self._running.get(run.job.job_id) is not run:
            return
        start, stop = run.chunks[index]
        is_last = index == len(run.chunks) - 1
        chunk = None
        if run.reservation is not None:
            chunk = Chunk(
                reservation=run.reservation,
                attempt=run.attempt,
                start=start,
                stop=stop,
                block_tables=run.tables,
            )
            for pusher in self.pushers:
                pusher.begin([chunk])
        for layer in LAYERS:
            self._write_rows(run, layer, start, stop, is_last)
            if chunk is not None:
                for pusher in self.pushers:
                    pusher.computed(layer, [chunk], lambda: None)
                    if self.clock.random.random() < 0.5:
                        pusher.turn()
        self.wake()
        if not self.runs:
            return  # a fault has struck while it pushed
        if run.preempt_after[run.attempt : run.attempt + 1] == [index]:
            self._preempt(run)
        elif is_last:
            self._hand_over(run)
        else:
            self._compute_later(run, index + 1)

    def _preempt(self, run: Run) -> None:
        self.clock.log(f"{self.name}: {run.job.job_id} is preempted")
        self.world.num_preempted += 1
        run.attempt += 1
        self._free(run.job, run.tables, run)

    def _write_rows(self, run: Run, layer: int, start: int, stop: int, is_last: bool) -> None:
        job, model = run.job, self.memory.model
        is_early = layer not in model.late_layers
        live = model.live_rows(layer, job.num_tokens)
        positions = range(start, stop) if is_early else live if is_last else range(0)
        table = run.tables[model.group(layer)]
        for index, row, at, end in model.pieces(layer, positions):
            for head in HEADS:
                right = right_rows(job.prompt, layer, head)[at:end]
                self.memory.write(job.job_id, layer, head, table[index], row, right)

    def _hand_over(self, run: Run) -> None:
        job = run.job
        del self._running[job.job_id]
        lease_id = f"{self.name}/{self.epoch}/{job.job_id}"
        deadline_ns = self.clock.now_ns + LEASE_DEADLINE * UNIT_NS
        for rank in self.ranks:
            rank.lease(lease_id, deadline_ns, LEASE * UNIT_NS)
        self._lent[lease_id] = Lent(job, run.tables)
        ticket = self.ranks[0].make_ticket(
            request_id=job.job_id,
            lease_id=lease_id,
            num_tokens=job.num_tokens,
            block_tables=run.tables,
            digests=[rank.digests(job.num_tokens, run.tables) for rank in self.ranks],
        )
        self.clock.log(f"{self.name}: {job.job_id} is computed; ticket of attempt {run.attempt}")
        token = right_token(job.prompt, 0)
        self.clock.call(self.name, None, self.world.on_prefilled, job, token, self._complete(run, ticket))
        self.clock.tick_while_busy(self, TICK)

    def _complete(self, run: Run, ticket: TransferTicket) -> TransferTicket:
        pushed_to = run.reservation.reservation_id if run.reservation is not None else None
        return sealed(
            replace(ticket, lease_ns=LEASE * UNIT_NS, reservation_id=pushed_to, attempt=run.attempt)
        )

    def _end_lease(self, lease_id: str) -> None:
        lent = self._lent.pop(lease_id)
        self._free(lent.job, lent.tables)

    def _free(self, job: Job, tables: Tables, again: Run | None = None) -> None:
        """Blocks go to others as soon as nothing is pushed from them."""
        blocks = [block for table in tables for block in table if block]
        waits = [pusher.void(blocks) for pusher in self.pushers]
        self._leaving.append(Leaving(job, tables, waits, again))
        self.wake()
        self.clock.tick_while_busy(self, TICK)

    def _give_left(self) -> None:
        for leaving in [left for left in self._leaving if all(event.is_set() for event in left.is_free)]:
            self._leaving.remove(leaving)
            self.memory.give(leaving.job.job_id, leaving.tables)
            run = leaving.again
            if run is not None:
                tables = self.memory.take(run.job.job_id, self.memory.model.counts(run.job.num_tokens, 0))
                assert tables is not None, "its own blocks are free again"
                run.tables = tables
                self._compute_later(run, 0)
            self._begin()
