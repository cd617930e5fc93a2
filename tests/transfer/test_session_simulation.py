"""Sessions and leases in a simulated world: seeded interleavings and faults, one clock, no threads.

A world has one producer engine, one consumer engine and one request. Every step picks a random thing that
may happen next: a read or fence completes, an event comes twice, a message is delivered (perhaps twice), a
peer is lost, a block is reused, a cancellation, time passing. After each step and at the end the invariants
of DESIGN.md are checked.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from rayk.transfer import session as s
from rayk.transfer.lease import LeaseTable, ReleaseMessage
from rayk.types.errors import KVMismatch, TransferError
from tests.markers import one_per

STEP_NS = 10
DEADLINE_NS = 1_000
LEASE_NS = 5_000
MISMATCH = KVMismatch("r", 1, 0, "k", 2, 3, "planted")


@dataclass
class Consumer:
    """One consumer rank: its session, what is in flight, and what really happened to its data."""

    rank: int
    producers: list[int]
    """Producer rank of each read."""
    notify: list[int]
    blocks: dict[int, tuple[int, ...]]
    session: s.Session = field(init=False)
    reads: set[int] = field(default_factory=set)
    fences: set[int] = field(default_factory=set)
    read_generations: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Per read: generations of its producer's blocks when its bytes were copied."""
    verified: list[KVMismatch | None] = field(default_factory=list)
    finishes: list[s.Finish] = field(default_factory=list)
    finished_ns: int = -1
    releases: int = 0
    drained: int = 0

    @property
    def in_flight(self) -> int:
        return len(self.reads) + len(self.fences)


class World:
    """`can_cancel`: whether the transport can take reads back."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        r = self.random
        self.now = 0
        self.num_producers = r.choice([1, 2, 4])
        num_consumers = r.choice([1, 2, 3])
        self.generations = {(p, b): r.randrange(3) for p in range(self.num_producers) for b in range(1, 4)}
        self.leases = [LeaseTable() for _ in range(self.num_producers)]
        self.over: list[list[str]] = [[] for _ in range(self.num_producers)]
        self.messages: list[tuple[int, ReleaseMessage]] = []
        self.lost = False
        self.can_cancel = r.random() < 0.5
        # Faults of this world; most worlds have none or one.
        self.faults = {
            f for f in ("reuse", "mismatch", "lose", "fail", "slow", "cancel") if r.random() < 0.15
        }
        self.consumers = [self.make_consumer(rank, num_consumers) for rank in range(num_consumers)]
        told_by = [[c.rank for c in self.consumers if p in c.notify] for p in range(self.num_producers)]
        self.num_expected = [len(t) for t in told_by]
        open_late = r.random() < 0.3
        if not open_late:
            self.open_leases()
        for c in self.consumers:
            self.carry_out(c, c.session.start())
        if open_late:
            self.open_leases()

    def make_consumer(self, rank: int, num_consumers: int) -> Consumer:
        r = self.random
        mine = [p for p in range(self.num_producers) if p % num_consumers == rank] or [0]
        producers = [p for p in mine for _ in range(r.choice([1, 1, 3]))]
        blocks = {p: tuple(sorted(r.sample([1, 2, 3], r.choice([1, 3])))) for p in mine}
        c = Consumer(rank, producers, mine, blocks)
        c.session = s.Session(
            "r",
            num_reads=len(producers),
            fences={p: s.Fence(b, self.snapshot(p, b)) for p, b in blocks.items()},
            notify=mine,
            deadline_ns=DEADLINE_NS,
        )
        return c

    def open_leases(self) -> None:
        for table in self.leases:
            table.open("lease", LEASE_NS)

    def snapshot(self, producer: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.generations[producer, b] for b in blocks)

    # What the driver would do

    def carry_out(self, c: Consumer, actions: list[s.Action]) -> None:
        """All actions in order; the events they cause are handled after them."""
        todo = deque(actions)
        while todo:
            for event in self.answer(c, todo.popleft()):
                todo.extend(c.session.handle(event, self.now))

    def answer(self, c: Consumer, action: s.Action) -> list[s.Event]:
        match action:
            case s.PostReads(reads):
                c.reads |= set(reads)
            case s.PostFence(rank):
                assert not c.reads, "a fence while data is in flight"
                assert len(c.read_generations) == len(c.producers), "a fence before all data"
                c.fences.add(rank)
            case s.ComputeDigests():
                assert not c.in_flight, "digests before all fences"
                c.verified.append(MISMATCH if "mismatch" in self.faults else None)
                return [s.Verified(c.verified[-1])] * self.random.choice([1, 2])
            case s.Cancel(reads, fences):
                assert (set(reads), set(fences)) == (c.reads, c.fences), "cancel what is in flight"
                if self.can_cancel:
                    c.reads, c.fences = set(), set()
                    ended = [s.ReadEnded(read, "cancelled") for read in reads]
                    return [*ended, *(s.FenceEnded(rank, "cancelled") for rank in fences)]
            case s.Release(ranks):
                assert list(ranks) == c.notify
                c.releases += 1
                self.messages += [
                    (p, ReleaseMessage("lease", f"d{c.rank}", self.num_expected[p])) for p in ranks
                ]
            case s.Finish():
                c.finishes.append(action)
                c.finished_ns = self.now
            case s.Drained():
                c.drained += 1
                assert c.finishes, "drained before it was over"
                assert not c.in_flight, "drained with reads in flight"
        return []

    def send(self, c: Consumer, event: s.Event) -> None:
        for _ in range(self.random.choice([1] * 9 + [2])):
            self.carry_out(c, c.session.handle(event, self.now))

    # What may happen

    def step(self) -> None:
        self.now += STEP_NS
        r = self.random
        c = r.choice(self.consumers)
        slow = "slow" in self.faults and self.now < 3 * DEADLINE_NS
        if c.reads and not self.lost and not slow and r.random() < 0.6:
            self.complete_read(c, r.choice(sorted(c.reads)))
        elif c.fences and not self.lost and not slow and r.random() < 0.6:
            self.complete_fence(c, r.choice(sorted(c.fences)))
        elif self.messages and r.random() < 0.5:
            self.deliver()
        if "reuse" in self.faults and r.random() < 0.05:
            self.generations[r.randrange(self.num_producers), r.randrange(1, 4)] += 1
        if "lose" in self.faults and not self.lost and r.random() < 0.03:
            self.lose()
        if "cancel" in self.faults and r.random() < 0.02:
            self.send(c, s.Failed("cancelled by the user"))
        if r.random() < 0.05:
            self.send(
                c, r.choice([s.ReadDone(99), s.FenceDone(99, ()), s.ReadEnded(99, "?"), s.Verified(None)])
            )
        for each in self.consumers:
            self.send(each, s.Tick())
        for p, table in enumerate(self.leases):
            self.over[p] += table.take_released() + table.expire(self.now)
        self.check()

    def complete_read(self, c: Consumer, read: int) -> None:
        c.reads.discard(read)
        if "fail" in self.faults and self.random.random() < 0.2:
            self.send(c, s.ReadEnded(read, "link down"))
            return
        producer = c.producers[read]
        c.read_generations[read] = self.snapshot(producer, c.blocks[producer])
        self.send(c, s.ReadDone(read))

    def complete_fence(self, c: Consumer, rank: int) -> None:
        c.fences.discard(rank)
        self.send(c, s.FenceDone(rank, self.snapshot(rank, c.blocks[rank])))

    def deliver(self) -> None:
        producer, message = self.messages.pop(self.random.randrange(len(self.messages)))
        if not self.lost:
            for _ in range(self.random.choice([1, 1, 2])):
                self.leases[producer].on_release(message)

    def lose(self) -> None:
        """The producer's process is gone: what was in flight ends, each consumer hears of it."""
        self.lost = True
        for c in self.consumers:
            self.send(c, s.Failed("producer engine is gone"))
            for read in sorted(c.reads):
                c.reads.discard(read)
                self.send(c, s.ReadEnded(read, "peer lost"))
            for rank in sorted(c.fences):
                c.fences.discard(rank)
                self.send(c, s.FenceEnded(rank, "peer lost"))

    # Invariants

    def check(self) -> None:
        for c in self.consumers:
            assert len(c.finishes) <= 1, "finished twice"
            assert c.releases <= 1, "released twice"
            assert c.drained <= 1, "drained twice"
            if c.finishes and c.finishes[0].error is None:
                self.check_success(c)
            if c.finishes and not c.finishes[0].is_draining:
                assert not c.in_flight, "over with reads in flight, and does not say so"
        for released in self.over:
            assert len(released) <= 1, "a lease ended twice"

    def check_success(self, c: Consumer) -> None:
        assert c.verified == [None], "ok without equal digests"
        assert len(c.read_generations) == len(c.producers), "ok without all data"
        for read, generations in c.read_generations.items():
            producer = c.producers[read]
            expected = c.session._fences[producer].generations
            assert generations == expected, "ok with bytes of a reused block"

    def check_end(self) -> None:
        for c in self.consumers:
            assert len(c.finishes) == 1, "no verdict"
            (finish,) = c.finishes
            assert c.finished_ns <= DEADLINE_NS + STEP_NS, "a verdict after the deadline"
            assert isinstance(finish.error, KVMismatch | TransferError | None)
            kept = isinstance(finish.error, KVMismatch)
            assert c.releases == (0 if kept else 1)
            assert c.drained == (1 if finish.is_draining else 0)
            assert c.session.is_drained
            if kept:
                self.carry_out(c, c.session.release())
                self.carry_out(c, c.session.release())
                assert c.releases == 1
        if not self.faults:
            assert all(c.finishes[0].error is None for c in self.consumers)
        while self.messages:
            self.deliver()
        for p, table in enumerate(self.leases):
            self.over[p] += table.take_released() + table.expire(LEASE_NS)
            assert self.over[p] == ["lease"], "every lease ends exactly once"
            assert table.open_leases == ()


@one_per()
@pytest.mark.parametrize("block", range(10))
def test_random_worlds(block: int):
    for seed in range(block * 100, block * 100 + 100):
        world = World(seed)
        try:
            while world.now < 4 * DEADLINE_NS:
                world.step()
            world.check_end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, faults {sorted(world.faults)}: {error}") from error


def test_the_worlds_reach_every_outcome():
    """The simulation is worth something only if each kind of ending occurs."""
    endings: set[str] = set()
    for seed in range(2000):
        world = World(seed)
        while world.now < 4 * DEADLINE_NS:
            world.step()
        for c in world.consumers:
            error = c.finishes[0].error
            text = "ok" if error is None else str(error).split(": ")[-1]
            endings.add(text.split(" (")[0] if "reused" in text else text)
            endings |= {"draining"} if c.finishes[0].is_draining else set()
        if {"ok", "draining", "planted", "link down", "producer engine is gone"} <= endings and any(
            "deadline passed while reading" in e for e in endings
        ):
            break
    assert {"ok", "draining", "planted", "link down", "producer engine is gone"} <= endings
    assert any("was reused while being read" in e for e in endings)
    assert any("deadline passed while reading" in e for e in endings)
    assert "cancelled by the user" in endings
