"""The scheduler over a real block manager: a random walk in a world that watches every key that is read."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.sched.drafting import Drafting
from rayk.sched.request_state import RequestState
from rayk.types.batch import UNKNOWN_TOKEN, ScheduledBatch
from rayk.types.request import FinishReason, Request, SamplingParams
from tests.kv.brute import full
from tests.sched.world import (
    BLOCK,
    EOS,
    GROUPS,
    STOP,
    World,
    expected_output,
    one_layer_each,
    sampled_token,
)

MAX_POSITIONS = 40

Step = tuple[ScheduledBatch, dict[str, int], dict[str, list[int]]]
"""A step, the tokens that it samples, and the blocks that it writes for each request."""


class Guesses:
    """A drafter that is right, wrong or without an idea, by request and position."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def propose(self, state: RequestState, num_tokens: int) -> list[int]:
        assert 0 < num_tokens <= self.num_tokens
        start, guessed = len(state.tokens), []
        for position in range(start, start + num_tokens):
            mood = (int(state.request_id) * 31 + position * 17 + position**2) % 7
            if mood == 0:
                break
            guessed.append((sampled_token(state.request_id, position - 1) + (mood == 1)) % 11)
        return guessed


class SchedulerWalk(RuleBasedStateMachine):
    """Requests come new, or prefilled after a read; leave by ending, by abort, or handed over to a lease."""

    @initialize(
        num_blocks=st.integers(12, 34),
        max_batch_tokens=st.sampled_from([1, 3, 7, 64]),
        max_seqs=st.integers(1, 4),
        num_stages=st.sampled_from([1, 1, 2, 4]),
        runs_ahead=st.booleans(),
        num_drafts=st.sampled_from([0, 0, 1, 3, 6]),
    )
    def begin(
        self,
        num_blocks: int,
        max_batch_tokens: int,
        max_seqs: int,
        num_stages: int,
        runs_ahead: bool,
        num_drafts: int,
    ) -> None:
        self.manager = KVCacheManager(GROUPS, num_blocks)
        self.drafting: Drafting | None = None
        if num_drafts:
            self.drafting = Drafting(Guesses(num_drafts), self.manager, has_states=True)
        self.scheduler = Scheduler(
            self.manager,
            max_batch_tokens=max_batch_tokens,
            max_seqs=max_seqs,
            max_positions=MAX_POSITIONS,
            eos_token_ids=[EOS],
            num_stages=num_stages,
            drafting=self.drafting,
        )
        self.max_seqs = max_seqs
        self.world = World(self.manager)
        self.states: dict[str, RequestState] = {}
        """Requests in the scheduler, in order of arrival."""
        self.reading: list[Request] = []
        self.leases: list[str] = []
        self.num_requests = 0
        self.num_preemptions = 0
        self.num_stages = num_stages
        self.num_ahead = num_stages - 1 if num_stages > 1 else int(runs_ahead)
        """Turns after which the scheduler is told the tokens of a step."""
        self.in_flight: list[Step | None] = []
        """Steps whose tokens the scheduler was not told, by turn."""

    def make_request(self, prompt: int, max_tokens: int, *, ignore_eos: bool, stops: bool) -> Request | None:
        """A request that the pool can hold when it is alone."""
        num_tokens = min(prompt + max_tokens, MAX_POSITIONS)
        needed = self.manager.max_request_blocks(num_tokens, self.scheduler.max_batch_tokens)
        if needed > self.manager.pool.num_blocks - 1:
            return None
        self.num_requests += 1
        return Request(
            request_id=str(self.num_requests),
            prompt_token_ids=tuple(range(100, 100 + prompt)),
            sampling=SamplingParams(
                max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=(STOP,) if stops else ()
            ),
        )

    @rule(
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        stops=st.booleans(),
    )
    def add(self, prompt: int, max_tokens: int, ignore_eos: bool, stops: bool) -> None:
        request = self.make_request(prompt, max_tokens, ignore_eos=ignore_eos, stops=stops)
        if request is not None:
            self.states[request.request_id] = self.scheduler.add(request)

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(2, 12))
    def start_read(self, prompt: int, max_tokens: int) -> None:
        request = self.make_request(prompt, max_tokens, ignore_eos=True, stops=False)
        if request is not None and self.manager.reserve_live(request.request_id, prompt) is not None:
            self.reading.append(request)

    @precondition(lambda self: self.reading)
    @rule(index=st.integers(0, 9), ok=st.booleans())
    def end_read(self, index: int, ok: bool) -> None:
        request = self.reading.pop(index % len(self.reading))
        if not ok:
            self.manager.free(request.request_id)
            return
        num_tokens = len(request.prompt_token_ids)
        self.world.prefill(request, num_tokens)
        first = sampled_token(request.request_id, num_tokens - 1)
        self.states[request.request_id] = self.scheduler.add_prefilled(request, [first])

    @precondition(lambda self: self.states)
    @rule(index=st.integers(0, 9))
    def abort(self, index: int) -> None:
        request_id = list(self.states)[index % len(self.states)]
        assert self.scheduler.remove(request_id) is self.states.pop(request_id)

    @precondition(lambda self: self.leases)
    @rule()
    def end_lease(self) -> None:
        self.manager.release(self.leases.pop())

    @rule(hand_over=st.booleans())
    def step(self, hand_over: bool = False) -> None:
        """A step; where steps run ahead, or stages work on several, an earlier one is settled then."""
        had_blocks = {r for r in self.states if self.holds(r)}
        able = [r for r, state in self.states.items() if self.may_go_on(state)]
        batch = self.scheduler.schedule()
        self.check_preempted(had_blocks)
        if batch is not None:
            self.check_batch(batch, able)
            self.in_flight.append((batch, self.world.run(batch), self.written_blocks(batch)))
        else:
            if self.states and not any(self.in_flight):
                self.check_idle()
            self.in_flight.append(None)
        settles_all = self.num_stages == 1 and self.scheduler.needs_settling
        due = len(self.in_flight) - (0 if settles_all else self.num_ahead)
        begun, self.in_flight = self.in_flight[: max(0, due)], self.in_flight[max(0, due) :]
        got_token = [state for step in begun if step is not None for state in self.settle(*step)]
        leaves = [s for s in got_token[:1] if s.finish_reason is None and not s.num_ahead]
        if hand_over and leaves:
            self.hand_over(leaves[0].request_id)

    def may_go_on(self, state: RequestState) -> bool:
        """Later stages tell the token that a stage would have to compute next; drafts follow known ones."""
        is_unknown = (self.num_stages > 1 or self.drafting is not None) and state.num_sampled_ahead > 0
        return state.may_go_on and not is_unknown

    def written_blocks(self, batch: ScheduledBatch) -> dict[str, list[int]]:
        """Blocks of each request that a step writes."""
        written = {}
        for share in batch.requests:
            tables = self.manager.block_tables(share.request_id)
            places = range(share.num_computed_tokens, share.num_computed_tokens + len(share.token_ids))
            sizes = [group.spec.block_size for group in GROUPS]
            blocks = {t[p // size] for t, size in zip(tables, sizes, strict=True) for p in places}
            written[share.request_id] = sorted(blocks)
        return written

    def check_not_reused(self, written: dict[str, list[int]]) -> None:
        """The last stage writes only now: a block that others got since would be spoilt."""
        for request_id, blocks in written.items():
            assert self.manager.holders(blocks) == dict.fromkeys(blocks, request_id)

    def settle(
        self, batch: ScheduledBatch, sampled: dict[str, int], written: dict[str, list[int]]
    ) -> list[RequestState]:
        if self.num_stages > 1:
            self.check_not_reused(written)
        shares = zip(batch.requests, self.scheduler.scheduled(batch), strict=True)
        expected = [s for r, s in shares if r.needs_logits and self.states.get(r.request_id) is s]
        got_token = self.scheduler.update(batch, sampled, None, self.world.accepted(batch))
        if self.drafting is not None:
            assert self.drafting.has_rollbacks <= any(r.num_drafts for r in batch.requests)
            self.world.roll_back(self.drafting.take_rollbacks())
        self.check_progress(batch)
        assert list(map(id, got_token)) == list(map(id, expected))
        for state in got_token:
            if state.finish_reason is not None:
                assert self.states.pop(state.request_id) is state
                ended = expected_output(state.request, MAX_POSITIONS)
                assert (state.output_token_ids, state.finish_reason) == ended
                assert state.num_recomputed_tokens == self.world.num_recomputed(state.request)
        return got_token

    def check_progress(self, batch: ScheduledBatch) -> None:
        """A request is computed as far as its tokens are known, the last one aside, and never beyond."""
        for share in batch.requests:
            state = self.states.get(share.request_id)
            if state is not None and share.num_drafts and state.row == share.row:
                assert state.num_computed == len(state.tokens) - 1
                assert state.num_new <= 1 + share.num_drafts

    def check_idle(self) -> None:
        """Nothing runs: blocks must be lacking, and only others can hold them."""
        assert self.reading or self.leases, "requests wait and nothing holds the blocks"
        assert self.scheduler.is_short_of_blocks

    def hand_over(self, request_id: str) -> None:
        del self.states[request_id]
        self.scheduler.remove(request_id, keep_blocks=True)
        self.manager.lease(request_id, request_id)
        self.leases.append(request_id)

    def holds(self, request_id: str) -> bool:
        try:
            return any(any(table) for table in self.manager.block_tables(request_id))
        except KeyError:
            return False

    def check_batch(self, batch: ScheduledBatch, able: list[str]) -> None:
        """`able`: requests whose tokens in flight, if any, need not be their last."""
        assert 0 < batch.num_tokens <= self.scheduler.max_batch_tokens
        assert all(len(r.token_ids) > 0 for r in batch.requests)
        rows = [r.row for r in batch.requests]
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(self.max_seqs))
        self.check_order([r.request_id for r in batch.requests], able)
        for share in batch.requests:
            state = self.states[share.request_id]
            # Its own token is counted, too.
            num_unknown = state.num_sampled_ahead - share.needs_logits
            tokens = state.tokens + [UNKNOWN_TOKEN] * num_unknown
            end = share.num_computed_tokens + len(share.token_ids) - share.num_drafts
            known = share.token_ids[: len(share.token_ids) - share.num_drafts]
            assert list(known) == tokens[share.num_computed_tokens : end]
            if share.num_drafts:
                assert share.needs_logits
                assert len(known) == 1, "chunks carry no drafts"
                assert share.num_drafts < state.num_tokens_left
            assert share.needs_logits == (end == len(tokens))

    def check_order(self, ids: list[str], able: list[str]) -> None:
        """First come, first served: whoever runs, everybody before runs too. With stages some wait for
        another step."""
        if self.num_stages == 1:
            assert ids == able[: len(ids)]
        else:
            assert ids == [r for r in able if r in ids]

    def check_preempted(self, had_blocks: set[str]) -> None:
        """Requests that lost their blocks are those that came last."""
        lost = [r for r in self.states if r in had_blocks and not self.scheduler_holds(r)]
        self.num_preemptions += len(lost)
        for request_id in lost:
            self.world.num_computed[request_id] = 0
        if lost:
            order = list(self.states)
            first = order.index(lost[0])
            assert all(r in lost or r not in had_blocks for r in order[first:])
        assert self.scheduler.num_preemptions == self.num_preemptions

    def scheduler_holds(self, request_id: str) -> bool:
        """Whether the request kept its KV (one that was preempted and came back at once did not). None that
        is in flight gives it."""
        in_flight = (r.request_id for step in self.in_flight if step for r in step[0].requests)
        return self.states[request_id].num_computed > 0 or request_id in in_flight

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.states)
        assert self.scheduler.num_running <= self.max_seqs

    def teardown(self) -> None:
        """Once others give their blocks back, every request ends, the oldest first if need be."""
        if not hasattr(self, "scheduler"):
            return
        while self.reading:
            self.end_read(0, True)
        while self.leases:
            self.end_lease()
        # Each step computes a token at least; a preemption throws away what one request has.
        for _ in range(200 * self.num_stages * (len(self.states) + 1)):
            if not self.states:
                break
            self.step()
            self.adds_up()
        for step in self.in_flight:
            if step is not None:
                self.settle(*step)
        assert not self.states, f"{list(self.states)} never end"
        assert not self.scheduler.has_work
        assert self.manager.pool.num_free_blocks == self.manager.pool.num_blocks - 1


TestSchedulerWalk = SchedulerWalk.TestCase
TestSchedulerWalk.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True
)


def small_scheduler(num_blocks: int, **changes: int) -> Scheduler:
    """One full-attention group with blocks of 4 tokens; `num_blocks` usable ones."""
    limits = {"max_batch_tokens": 64, "max_seqs": 4, "max_positions": 100} | changes
    return Scheduler(KVCacheManager(one_layer_each(full(BLOCK)), num_blocks + 1), **limits)


def request(request_id: str, num_prompt: int, max_tokens: int = 8) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def run(scheduler: Scheduler) -> list[str]:
    """One step with token 5 for everybody; who was in it."""
    batch = scheduler.schedule()
    if batch is None:
        return []
    scheduler.update(batch, {r.request_id: 5 for r in batch.requests})
    return [r.request_id for r in batch.requests]


def test_chunks_fill_the_budget_and_decodes_come_first() -> None:
    scheduler = small_scheduler(20, max_batch_tokens=10)
    scheduler.add(request("a", 8))
    scheduler.add(request("b", 15))
    sizes = []
    for _ in range(4):
        batch = scheduler.schedule()
        assert batch is not None
        sizes.append([(r.request_id, len(r.token_ids), r.needs_logits) for r in batch.requests])
        scheduler.update(batch, {r.request_id: 5 for r in batch.requests})
    assert sizes == [
        [("a", 8, True), ("b", 2, False)],
        [("a", 1, True), ("b", 9, False)],
        [("a", 1, True), ("b", 4, True)],
        [("a", 1, True), ("b", 1, True)],
    ]


def test_stages_have_a_step_each_and_blocks_of_the_aborted_wait_for_the_last() -> None:
    scheduler = small_scheduler(12, max_batch_tokens=8, num_stages=2)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 4))
    steps = []

    def tick() -> list[tuple[str, int]]:
        """Schedule a step, then account for the one before it; who is in the step."""
        batch = scheduler.schedule()
        steps.append(batch)
        if len(steps) > 1 and (last := steps[-2]) is not None:
            scheduler.update(last, {r.request_id: 5 for r in last.requests if r.needs_logits})
        return [(r.request_id, len(r.token_ids)) for r in batch.requests] if batch is not None else []

    assert tick() == [("a", 4), ("b", 4)]
    assert tick() == [("c", 4)], "the others' tokens are known only now"
    assert [tick() for _ in range(3)] == [[("a", 1), ("b", 1)], [("c", 1)], [("a", 1), ("b", 1)]]
    num_free = scheduler.allocator.pool.num_free_blocks  # type: ignore[attr-defined]
    scheduler.remove("a")
    assert scheduler.holds("a")
    assert scheduler.num_in_flight == 1
    assert scheduler.allocator.pool.num_free_blocks == num_free  # type: ignore[attr-defined]
    assert tick() == [("c", 1)]
    assert not scheduler.holds("a")
    assert scheduler.allocator.pool.num_free_blocks > num_free  # type: ignore[attr-defined]
    ended: list[str] = []
    scheduler.remove("c", then=lambda: ended.append("c"))
    assert (scheduler.holds("c"), ended) == (True, [])
    tick()
    assert (scheduler.holds("c"), ended) == (False, ["c"])


def test_the_latest_request_is_preempted_and_comes_back() -> None:
    scheduler = small_scheduler(4)
    scheduler.add(request("a", 7))
    b = scheduler.add(request("b", 8))
    assert run(scheduler) == ["a", "b"]
    # b needs a third block for its first output token, a another one after that: four are there.
    assert run(scheduler) == ["a"]
    assert b.num_preemptions == 1
    assert b.num_computed == 0
    ran = [run(scheduler) for _ in range(20)]
    assert ["b"] in ran, "b runs once a has ended"
    assert b.finish_reason is FinishReason.LENGTH
    assert b.output_token_ids == [5] * 8


def test_a_preempted_request_does_not_return_in_the_same_step() -> None:
    scheduler = small_scheduler(5, max_batch_tokens=9)
    scheduler.add(request("a", 8))
    scheduler.add(request("b", 8))
    while scheduler.num_preemptions == 0:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, {r.request_id: 5 for r in batch.requests})
    assert [r.request_id for r in batch.requests] == ["a"]


@pytest.mark.parametrize("max_seqs", [1, 4])
def test_prefilled_requests_that_wait_cannot_block_each_other(max_seqs: int) -> None:
    """Nobody runs, every block is held by a request that waits for one more."""
    scheduler = small_scheduler(4, max_seqs=max_seqs)
    for name in ("a", "b"):
        manager = scheduler.allocator
        assert isinstance(manager, KVCacheManager)
        assert manager.reserve_live(name, 8) is not None
        scheduler.add_prefilled(request(name, 8), [5])
    a, b = scheduler._waiting
    for _ in range(40):
        run(scheduler)
        scheduler.check_integrity()
    assert (a.finish_reason, b.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


def test_a_running_request_takes_blocks_of_a_later_one_that_waits() -> None:
    scheduler = small_scheduler(4, max_seqs=1)
    manager = scheduler.allocator
    assert isinstance(manager, KVCacheManager)
    a = scheduler.add(request("a", 8))
    run(scheduler)
    assert manager.reserve_live("b", 8) is not None
    b = scheduler.add_prefilled(request("b", 8), [5])
    for _ in range(40):
        run(scheduler)
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert b.output_token_ids == [5] * 8


def test_a_request_aborted_while_its_step_runs_is_passed_over() -> None:
    scheduler = small_scheduler(8)
    scheduler.add(request("a", 4))
    scheduler.add(request("b", 4))
    batch = scheduler.schedule()
    assert batch is not None
    assert scheduler.remove("a") is not None
    assert scheduler.remove("a") is None
    got = scheduler.update(batch, {"a": 5, "b": 5})
    assert [s.request_id for s in got] == ["b"]
    scheduler.check_integrity()


def test_a_row_is_told_whole_tables_when_its_owner_changes() -> None:
    scheduler = small_scheduler(8, max_seqs=1)
    scheduler.add(request("a", 9, max_tokens=1))
    scheduler.add(request("b", 4, max_tokens=3))
    run(scheduler)
    batch = scheduler.schedule()
    assert batch is not None
    (share,) = batch.requests
    assert (share.request_id, share.row) == ("b", 0)
    assert share.new_block_ids == ((0, scheduler.allocator.block_tables("b")[0]),)
