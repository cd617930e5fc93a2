"""Swapping in a scheduler: a random walk in the world that watches every key, with a swapper that takes,
refuses, dawdles and fails; and the single rules."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.sched.request_state import RequestState
from tests.markers import thorough
from tests.sched.test_batching import SchedulerWalk, request, small_scheduler
from tests.sched.world import BLOCK, STATE_BLOCKS, WINDOWS, World

Row = tuple[int, int]
"""(group, position); of a state, that of its last token."""


def live_rows(num_tokens: int) -> list[Row]:
    """What the next token reads, by the definition of each group."""
    rows = []
    for group, window in enumerate(WINDOWS):
        start = 0 if window is None else max(0, num_tokens + 1 - window)
        rows += [(group, position) for position in range(start, num_tokens)]
    return rows + [(len(WINDOWS) + at, num_tokens - 1) for at in range(len(STATE_BLOCKS))]


def place(tables: tuple[tuple[int, ...], ...], row: Row) -> tuple[int, int, int]:
    """(group, block, slot) of a row."""
    group, position = row
    if group < len(WINDOWS):
        return group, tables[group][position // BLOCK], position % BLOCK
    return group, tables[group][position // STATE_BLOCKS[group - len(WINDOWS)]], 0


@dataclass
class Taken:
    """One request in the host's hands."""

    state: RequestState
    tables: tuple[tuple[int, ...], ...]
    stage: str = "leaving"
    """leaving, kept, returning or forgotten (blocks still being copied out)"""
    rows: dict[Row, tuple[str, int, int]] = field(default_factory=dict)


class Host:
    """A swapper over a real block manager that does the next thing when it is told to."""

    def __init__(self, scheduler: Scheduler, manager: KVCacheManager, world: World) -> None:
        self.scheduler, self.manager, self.world = scheduler, manager, world
        self.answers: list[str] = []
        """What to do with the next requests: take (also if empty), refuse, or take at once."""
        self.taken: dict[str, Taken] = {}
        self.seen: Counter[str] = Counter()
        """What happened."""

    def alive(self) -> list[str]:
        """Requests that are away and were not aborted."""
        return [r for r, taken in self.taken.items() if taken.stage != "forgotten"]

    def swap_out(self, state: RequestState) -> bool:
        assert state.row is None
        assert not any(t.stage == "leaving" for t in self.taken.values()), "one victim at a time"
        answer = self.answers.pop(0) if self.answers else "take"
        self.seen[answer] += 1
        if answer == "refuse":
            return False
        tables = self.manager.block_tables(state.request_id)
        self.taken[state.request_id] = Taken(state, tables)
        self.manager.lease(state.request_id, f"swap {state.request_id}")
        if answer == "at once":
            self.copied_out(state.request_id)
        return True

    def forget(self, request_id: str) -> None:
        taken = self.taken[request_id]
        self.seen[f"forgot {taken.stage}"] += 1
        if taken.stage == "leaving":
            taken.stage = "forgotten"
            return
        del self.taken[request_id]
        if taken.stage == "returning":
            self.manager.free(f"in {request_id}")

    def copied_out(self, request_id: str) -> None:
        """The rows are read, and are what the request wrote."""
        taken = self.taken[request_id]
        for row in live_rows(taken.state.num_computed):
            slot = place(taken.tables, row)
            assert slot[1] != 0, "a live row has a block"
            taken.rows[row] = self.world.memory[slot]
            assert taken.rows[row][:2] == (request_id, row[1]), "a block was used while it was copied"
        self.manager.release(f"swap {request_id}")
        taken.stage = "kept"
        self.scheduler.blocks_left(request_id)

    def reserve(self, request_id: str) -> bool:
        """Blocks for the return, or room made for them; False: neither now."""
        if not self.scheduler.may_return(request_id):
            return False
        taken = self.taken[request_id]
        tables = self.manager.reserve_live(f"in {request_id}", taken.state.num_computed)
        if tables is None:
            if not self.scheduler.make_room(request_id):
                return False
            self.seen["room made"] += 1
            return True
        taken.stage = "returning"
        return True

    def copied_in(self, request_id: str) -> None:
        taken = self.taken.pop(request_id)
        self.manager.rename(f"in {request_id}", request_id)
        tables = self.manager.block_tables(request_id)
        for row, written in taken.rows.items():
            self.world.memory[place(tables, row)] = written
        assert self.scheduler.come_back(request_id)
        self.seen["back"] += 1

    def fail(self, request_id: str) -> None:
        taken = self.taken.pop(request_id)
        self.seen[f"failed {taken.stage}"] += 1
        if taken.stage == "leaving":
            self.manager.release(f"swap {request_id}")
        elif taken.stage == "returning":
            self.manager.free(f"in {request_id}")
        assert self.scheduler.start_over(request_id)

    def go_on(self, request_id: str) -> bool:
        """The next thing that can become of a request; False: it has to wait."""
        taken = self.taken[request_id]
        if taken.stage == "forgotten":
            del self.taken[request_id]
            self.manager.release(f"swap {request_id}")
        elif taken.stage == "leaving":
            self.copied_out(request_id)
        elif taken.stage == "kept":
            return self.reserve(request_id)
        else:
            self.copied_in(request_id)
        return True


class SwapWalk(SchedulerWalk):
    """The walk of test_batching.py with a swapper."""

    @initialize(
        num_blocks=st.integers(12, 26),
        max_batch_tokens=st.sampled_from([1, 3, 7, 64]),
        max_seqs=st.integers(1, 4),
        num_stages=st.sampled_from([1, 1, 3]),
        runs_ahead=st.booleans(),
    )
    def begin(
        self, num_blocks: int, max_batch_tokens: int, max_seqs: int, num_stages: int, runs_ahead: bool
    ) -> None:
        super().begin(num_blocks, max_batch_tokens, max_seqs, num_stages, runs_ahead, num_drafts=0)
        self.host = Host(self.scheduler, self.manager, self.world)
        self.scheduler.swapper = self.host
        self.known: dict[str, tuple[int, int]] = {}
        """Preemptions and swaps of each request as of the last look."""
        self.num_swaps = 0

    @rule(answer=st.sampled_from(["take", "refuse", "at once"]))
    def decide(self, answer: str) -> None:
        if len(self.host.answers) < 3:
            self.host.answers.append(answer)

    @precondition(lambda self: self.host.taken)
    @rule(index=st.integers(0, 9), times=st.integers(1, 3))
    def swap(self, index: int, times: int) -> None:
        request_id = list(self.host.taken)[index % len(self.host.taken)]
        for _ in range(times):
            if request_id in self.host.taken:
                self.host.go_on(request_id)
        self.lost()

    @precondition(lambda self: self.host.alive())
    @rule(index=st.integers(0, 9))
    def fail(self, index: int) -> None:
        alive = self.host.alive()
        self.host.fail(alive[index % len(alive)])
        self.lost()

    def lost(self) -> list[str]:
        """Who lost its blocks since the last look, in order of arrival."""
        found = []
        for request_id, state in self.states.items():
            preemptions, swaps = self.known.get(request_id, (0, 0))
            self.known[request_id] = (state.num_preemptions, state.num_swaps)
            if state.num_preemptions > preemptions:
                self.world.num_computed[request_id] = 0
            self.num_preemptions += state.num_preemptions - preemptions
            self.num_swaps += state.num_swaps - swaps
            if self.known[request_id] != (preemptions, swaps):
                found.append(request_id)
        return found

    def check_preempted(self, had_blocks: set[str]) -> None:
        """Requests that lost their blocks are those that came last."""
        order, lost = list(self.states), self.lost()
        assert had_blocks.issuperset(lost)
        if lost:
            assert all(r in lost or r not in had_blocks for r in order[order.index(lost[0]) :])
        num_running = self.scheduler.num_running
        assert [r for r in order if self.states[r].row is not None] == order[:num_running]

    def check_order(self, ids: list[str], able: list[str]) -> None:
        """Only who lacks blocks is passed over, while some are on their way."""
        order = [r for r in self.states if r in ids]
        assert ids == order
        if self.num_stages == 1 and order != able[: len(ids)]:
            assert self.scheduler.is_short_of_blocks
            assert any(t.stage == "leaving" for t in self.host.taken.values())

    def progress(self) -> list[int]:
        """What changes when anything happens."""
        counts = [self.num_swaps, self.num_preemptions, self.scheduler.is_short_of_blocks]
        return [*counts, *(n for s in self.states.values() for n in (s.num_computed, s.num_begun))]

    def check_idle(self) -> None:
        assert self.reading or self.leases or self.host.taken, "requests wait and nothing holds the blocks"

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "host"):
            return
        self.scheduler.check_integrity()
        assert self.scheduler.num_away == len(self.host.alive())
        num_here = self.scheduler.num_running + self.scheduler.num_waiting
        assert num_here + self.scheduler.num_away == len(self.states)
        assert self.scheduler.has_work == (num_here > 0)
        assert self.scheduler.num_swaps == self.num_swaps
        assert self.scheduler.num_preemptions == self.num_preemptions

    def teardown(self) -> None:
        """The swapper answers from now on, and every request ends."""
        if not hasattr(self, "host"):
            return
        while self.reading:
            self.end_read(0, True)
        while self.leases:
            self.end_lease()
        # A step computes a token at least, or something comes of a swap.
        for _ in range(200 * self.num_stages * (len(self.states) + 1)):
            before = self.progress()
            is_moving = [self.host.go_on(r) for r in list(self.host.taken)]
            self.lost()
            if not self.states:
                break
            self.step()
            self.adds_up()
            is_moving.append(any(self.in_flight))
            assert any(is_moving) or self.progress() != before, "a deadlock"
        for step in filter(None, self.in_flight):
            self.settle(*step)
        assert not self.states, f"{list(self.states)} never end"
        assert not self.scheduler.has_work
        assert not self.host.taken
        assert self.manager.pool.num_free_blocks == self.manager.pool.num_blocks - 1


TestSwapWalk = SwapWalk.TestCase
TestSwapWalk.settings = settings(max_examples=250, stateful_step_count=50, deadline=None, derandomize=True)


def walk_at_random(seed: int, *, num_stages: int = 1, runs_ahead: bool = False) -> SwapWalk:
    """A longer walk, with more requests than the pool can hold all the time."""
    draw = random.Random(seed)
    walk = SwapWalk()
    sizes = draw.randint(16, 30), draw.choice([1, 3, 7, 64]), draw.randint(1, 4)
    walk.begin(*sizes, num_stages=num_stages, runs_ahead=runs_ahead)
    for _ in range(300):
        if len(walk.states) < 6:
            prompt, max_tokens = draw.randint(1, 30), draw.randint(2, 12)
            if draw.random() < 0.6:
                walk.add(prompt, max_tokens, ignore_eos=draw.random() < 0.8, stops=draw.random() < 0.2)
            else:
                walk.start_read(prompt, max_tokens)
        if walk.reading and draw.random() < 0.5:
            walk.end_read(draw.randrange(9), draw.random() < 0.9)
        if draw.random() < 0.06:
            walk.decide(draw.choice(["refuse", "at once"]))
        if walk.host.taken and draw.random() < 0.4:
            walk.swap(draw.randrange(9), 1)
        if walk.host.alive() and draw.random() < 0.05:
            walk.fail(draw.randrange(9))
        if walk.states and draw.random() < 0.05:
            walk.abort(draw.randrange(9))
        walk.step(draw.random() < 0.02)
        if walk.leases and draw.random() < 0.3:
            walk.end_lease()
        walk.adds_up()
    walk.teardown()
    return walk


@thorough
def test_long_walks_swap_in_every_way() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        walk = walk_at_random(seed, num_stages=2 if 20 <= seed < 40 else 1, runs_ahead=seed >= 40)
        seen.update(walk.host.seen)
    wanted = ["take", "refuse", "at once", "back", "room made"]
    wanted += [
        f"{what} {stage}" for what in ("failed", "forgot") for stage in ("leaving", "kept", "returning")
    ]
    assert {name: seen[name] for name in wanted if seen[name] < 5} == {}, seen


@pytest.mark.parametrize("num_turns", [1, 3, 10])
def test_many_requests_share_a_small_pool_without_computing_anything_twice(num_turns: int) -> None:
    """Copies that take some turns: each request leaves and returns seldom, and all end."""
    scheduler = small_scheduler(40, max_batch_tokens=64, max_seqs=16)
    manager = scheduler.allocator
    assert isinstance(manager, KVCacheManager)
    scheduler.swapper = late = LateHost(scheduler, manager, num_turns)
    draw = random.Random(num_turns)
    states = [
        scheduler.add(request(str(n), draw.randint(8, 40), max_tokens=draw.randint(4, 32))) for n in range(64)
    ]
    num_computed = 0
    for _ in range(3000):
        late.turn()
        if (batch := scheduler.schedule()) is not None:
            num_computed += batch.num_tokens
            scheduler.update(batch, {r.request_id: 5 for r in batch.requests})
        scheduler.check_integrity()
    assert num_computed == sum(len(s.tokens) - 1 for s in states), "each token once"
    assert all(s.output_token_ids == [5] * s.request.sampling.max_tokens for s in states)
    assert 15 < scheduler.num_swaps < 128, "twice each at most"
    assert scheduler.num_preemptions == 0
    assert manager.pool.num_free_blocks == 40


class LateHost:
    """Takes everything; each copy, either way, takes so many turns."""

    def __init__(self, scheduler: Scheduler, manager: KVCacheManager, num_turns: int) -> None:
        self.scheduler, self.manager, self.num_turns = scheduler, manager, num_turns
        self.out: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        """Request -> tokens"""
        self.back: dict[str, int] = {}

    def swap_out(self, state: RequestState) -> bool:
        self.manager.lease(state.request_id, f"swap {state.request_id}")
        self.out[state.request_id] = self.num_turns
        self.kept[state.request_id] = state.num_computed
        return True

    def forget(self, request_id: str) -> None:
        raise AssertionError(f"{request_id} was not aborted")

    def turn(self) -> None:
        """Some of every copy is done; who may takes blocks and begins to return."""
        for copies in (self.out, self.back):
            for request_id in copies:
                copies[request_id] -= 1
        for request_id in [r for r, left in self.out.items() if left == 0]:
            del self.out[request_id]
            self.manager.release(f"swap {request_id}")
            self.scheduler.blocks_left(request_id)
        for request_id in [r for r, left in self.back.items() if left == 0]:
            del self.back[request_id]
            assert self.scheduler.come_back(request_id, self.kept.pop(request_id))
        for request_id in self.kept.keys() - self.back.keys():
            if self.scheduler.may_return(request_id):
                if self.manager.reserve_live(request_id, self.kept[request_id]) is not None:
                    self.back[request_id] = self.num_turns
                else:
                    self.scheduler.make_room(request_id)
