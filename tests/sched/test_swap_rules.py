"""The single rules of swapping, each in a world of one group and a few blocks."""

from __future__ import annotations

import random

import pytest

from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.sched.request_state import RequestState, max_cached_tokens
from rayk.types.batch import ScheduledRequest
from rayk.types.request import FinishReason, Request, SamplingParams, TokenLogprobs
from tests.kv.brute import full
from tests.sched.test_batching import request, run, small_scheduler
from tests.sched.test_prompt_logits import told_of
from tests.sched.world import BLOCK, one_layer_each


class Taker:
    """Takes every request, and keeps its blocks under a lease until told otherwise."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        assert isinstance(scheduler.allocator, KVCacheManager)
        self.manager = scheduler.allocator
        self.taken: list[str] = []
        self.forgotten: list[str] = []
        scheduler.swapper = self

    def swap_out(self, state: RequestState) -> bool:
        self.taken.append(state.request_id)
        self.manager.lease(state.request_id, f"swap {state.request_id}")
        return True

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def left(self, request_id: str) -> None:
        """The blocks are free."""
        self.manager.release(f"swap {request_id}")
        self.scheduler.blocks_left(request_id)

    def bring_back(self, request_id: str, num_tokens: int) -> None:
        """The KV of some tokens is there again."""
        if num_tokens:
            assert self.manager.reserve_live(request_id, num_tokens) is not None
        assert self.scheduler.come_back(request_id, num_tokens)


def with_taker(num_blocks: int, **changes: int) -> tuple[Scheduler, Taker]:
    scheduler = small_scheduler(num_blocks, **changes)
    return scheduler, Taker(scheduler)


def prefilled(scheduler: Scheduler, request_id: str, num_prompt: int) -> RequestState:
    """A request whose prompt was prefilled elsewhere."""
    assert isinstance(scheduler.allocator, KVCacheManager)
    assert scheduler.allocator.reserve_live(request_id, num_prompt) is not None
    return scheduler.add_prefilled(request(request_id, num_prompt), [5])


def test_who_needs_blocks_pauses_until_the_victims_are_free_and_others_go_on() -> None:
    scheduler, taker = with_taker(6)
    a, b = scheduler.add(request("a", 7)), scheduler.add(request("b", 5))
    c = scheduler.add(request("c", 5))
    assert run(scheduler) == ["a", "b", "c"]
    assert run(scheduler) == ["a", "b", "c"]  # two blocks each, a's are full
    d = scheduler.add(request("d", 1))
    for _ in range(2):
        assert run(scheduler) == ["b"], "a pauses, b needs nothing, d came after c"
        assert scheduler.is_short_of_blocks
    assert run(scheduler) == [], "b pauses too, and is no victim"
    assert (taker.taken, scheduler.num_away, scheduler.num_running) == (["c"], 1, 2)
    taker.left("c")
    assert run(scheduler) == ["a", "b"]
    assert not scheduler.is_short_of_blocks
    assert (c.num_swaps, c.num_preemptions, scheduler.num_swaps, scheduler.num_preemptions) == (1, 0, 1, 0)
    assert (c.num_computed, c.row) == (6, None)
    assert (a.num_swaps, b.num_swaps, d.row) == (0, 0, None)
    scheduler.check_integrity()


def test_a_request_goes_on_with_the_tokens_it_had() -> None:
    scheduler, taker = with_taker(4)
    scheduler.add(request("a", 7))
    b = scheduler.add(request("b", 8))
    c = scheduler.add(request("c", 3, max_tokens=1))
    assert run(scheduler) == ["a", "b"]
    while scheduler.num_running == 2:
        run(scheduler)
    assert taker.taken == ["b"]
    taker.left("b")
    while scheduler.num_running:
        assert run(scheduler) == ["a"]
    assert scheduler.num_waiting == 1
    assert scheduler.may_return("b")
    scheduler.take_admitted()
    taker.bring_back("b", b.num_computed)
    batch = scheduler.schedule()
    assert batch is not None
    assert [(s.request_id, s.num_computed_tokens) for s in batch.requests] == [("b", 8), ("c", 0)]
    assert [s.request_id for s in scheduler.take_admitted()] == ["b", "c"], "in order of arrival"
    share = batch.requests[0]
    assert share.new_block_ids == ((0, taker.manager.block_tables("b")[0]),), "its row is told whole tables"
    assert share.num_filled_blocks == (2,)
    scheduler.update(batch, dict.fromkeys("bc", 5))
    assert (b.num_recomputed_tokens, b.num_cached_tokens, c.num_cached_tokens) == (0, 0, 0)
    assert scheduler.num_looked_up_tokens == 7 + 8 + 3, "each counts once"
    while scheduler.has_work:
        run(scheduler)
    assert b.output_token_ids == [5] * 8


def test_a_lone_request_gets_the_blocks_of_one_whose_swap_fails() -> None:
    scheduler, taker = with_taker(4)
    a, b = scheduler.add(request("a", 7)), scheduler.add(request("b", 8))
    for _ in range(4):
        run(scheduler)
    assert (a.row is not None, taker.taken) == (True, ["b"])
    while run(scheduler):
        pass
    assert (a.row, a.finish_reason) == (0, None), "it waits for blocks that do not come"
    taker.manager.release("swap b")  # the swapper gives up
    assert scheduler.start_over("b")
    assert run(scheduler) == ["a"]
    while scheduler.has_work:
        run(scheduler)
    assert (a.output_token_ids, b.output_token_ids) == ([5] * 8, [5] * 8)
    assert (b.num_preemptions, b.num_swaps, scheduler.num_preemptions) == (1, 1, 1)


def test_a_request_alone_is_away_itself_while_others_hold_the_blocks() -> None:
    scheduler, taker = with_taker(3)
    assert taker.manager.reserve_live("lease", 4) is not None
    a = scheduler.add(request("a", 8))
    assert run(scheduler) == ["a"]
    assert run(scheduler) == []
    assert (taker.taken, scheduler.has_work, scheduler.num_away) == (["a"], False, 1)
    taker.left("a")
    assert not scheduler.may_return("a"), "it was short of blocks just now"
    taker.manager.free("lease")
    assert scheduler.schedule() is None
    assert scheduler.may_return("a")
    taker.bring_back("a", a.num_computed)
    while scheduler.has_work and len(a.tokens) < 12:
        assert run(scheduler) == ["a"]
    assert len(a.tokens) == 12


def test_one_that_waits_goes_before_a_later_one_that_is_away() -> None:
    scheduler, taker = with_taker(4, max_seqs=1)
    a = prefilled(scheduler, "a", 8)
    prefilled(scheduler, "b", 8)
    assert run(scheduler) == [], "b's blocks are on their way"
    assert (taker.taken, scheduler.num_waiting) == (["b"], 1)
    assert run(scheduler) == []
    taker.left("b")
    assert not scheduler.may_return("b"), "a is first"
    assert run(scheduler) == ["a"]
    assert scheduler.may_return("b")
    assert not scheduler.make_room("b"), "a will end"
    assert a.num_swaps == 0


def test_who_is_away_lets_one_before_it_have_its_row_first() -> None:
    scheduler, taker = with_taker(6, max_seqs=1)
    scheduler.add(request("x", 4))
    run(scheduler)
    prefilled(scheduler, "a", 8)
    prefilled(scheduler, "b", 12)
    assert run(scheduler) == []
    assert taker.taken == ["b"]
    taker.left("b")
    assert run(scheduler) == ["x"]
    assert (scheduler.num_waiting, scheduler.is_short_of_blocks) == (1, False)
    assert not scheduler.may_return("b"), "a is first"
    while scheduler.num_waiting:
        run(scheduler)
    assert scheduler.may_return("b")


def test_room_is_made_for_the_first_away_by_those_that_came_later() -> None:
    scheduler, taker = with_taker(4)
    a, b = scheduler.add(request("a", 4)), scheduler.add(request("b", 8))
    run(scheduler)
    c = scheduler.add(request("c", 4))
    while not taker.taken:
        run(scheduler)
    taker.left("b")
    while a.finish_reason is None:
        run(scheduler)
    d, e = prefilled(scheduler, "d", 4), prefilled(scheduler, "e", 8)
    assert scheduler.schedule() is None, "all that wait came after b"
    assert (c.row, d.row, e.row) == (None, None, None)
    assert taker.manager.reserve_live("b", 8) is None
    assert scheduler.make_room("b")
    assert not scheduler.make_room("b"), "e's blocks are on their way"
    assert taker.taken == ["b", "e"]
    taker.left("e")
    assert not scheduler.may_return("e"), "b is before it"
    taker.bring_back("b", b.num_computed)
    assert run(scheduler) == ["b"]
    scheduler.check_integrity()


def test_no_room_is_made_while_others_run() -> None:
    scheduler, taker = with_taker(5)
    scheduler.add(request("a", 4))
    b = scheduler.add(request("b", 12))
    run(scheduler)
    while not taker.taken:
        run(scheduler)
    taker.left("b")
    assert run(scheduler) == ["a"]
    c = prefilled(scheduler, "c", 8)
    assert scheduler.may_return("b")
    assert taker.manager.reserve_live("b", b.num_computed) is None
    assert not scheduler.make_room("b"), "a will end"
    assert (c.num_swaps, c.num_computed) == (0, 8)


def test_no_request_starts_while_one_pauses() -> None:
    """Not even one that came before who is away."""
    scheduler, taker = with_taker(6, max_batch_tokens=8)
    a = scheduler.add(request("a", 15))
    assert run(scheduler) == ["a"]
    w = scheduler.add(request("w", 4))
    prefilled(scheduler, "b", 12)
    assert taker.manager.pool.num_free_blocks == 1, "enough for w"
    assert run(scheduler) == [], "a needs two and pauses until b's are free"
    assert (taker.taken, w.row) == (["b"], None)
    taker.left("b")
    assert run(scheduler) == ["a", "w"]
    assert a.num_swaps == 0


def test_an_aborted_request_is_forgotten_and_late_answers_are_refused() -> None:
    scheduler, taker = with_taker(4)
    scheduler.add(request("a", 7))
    b = scheduler.add(request("b", 8))
    while not taker.taken:
        run(scheduler)
    assert scheduler.remove("b") is b
    assert (taker.forgotten, scheduler.num_away, scheduler.remove("b")) == (["b"], 0, None)
    scheduler.blocks_left("b")
    assert not scheduler.come_back("b")
    assert not scheduler.start_over("b")
    assert not scheduler.may_return("b")
    taker.manager.release("swap b")
    while scheduler.has_work:
        run(scheduler)
    assert scheduler.num_waiting == 0
    assert taker.manager.pool.num_free_blocks == 4


def test_one_can_come_back_before_its_blocks_have_left() -> None:
    class Unwilling(Taker):
        def swap_out(self, state: RequestState) -> bool:
            self.taken.append(state.request_id)
            return True

    scheduler = small_scheduler(4)
    taker = Unwilling(scheduler)
    a, b = scheduler.add(request("a", 7)), scheduler.add(request("b", 8))
    for _ in range(6):
        run(scheduler)
    assert (len(taker.taken), a.finish_reason) == (1, None)
    assert scheduler.come_back("b")  # all it had is in the blocks it had
    scheduler.swapper = None
    while scheduler.has_work:
        run(scheduler)
    assert (b.output_token_ids, b.num_preemptions, b.num_swaps) == ([5] * 8, 1, 1)


def test_who_comes_back_with_less_computes_the_rest_again() -> None:
    scheduler, taker = with_taker(4)
    scheduler.add(request("a", 7, max_tokens=3))
    b = scheduler.add(request("b", 8))
    while not taker.taken:
        run(scheduler)
    taker.left("b")
    while scheduler.num_running:
        run(scheduler)
    with pytest.raises(AssertionError, match="tokens that it had"):
        scheduler.come_back("b", 9)
    scheduler, taker = with_taker(4)
    scheduler.add(request("a", 7, max_tokens=3))
    b = scheduler.add(request("b", 8))
    while not taker.taken:
        run(scheduler)
    taker.left("b")
    while scheduler.num_running:
        run(scheduler)
    taker.bring_back("b", 4)
    while scheduler.has_work:
        run(scheduler)
    assert (b.num_recomputed_tokens, b.num_preemptions, b.num_swaps) == (4, 1, 1)
    assert (b.output_token_ids, b.finish_reason) == ([5] * 8, FinishReason.LENGTH)


def test_prompt_tokens_are_told_of_once_whatever_comes_back() -> None:
    assert sum(run_told_requests(seed) for seed in range(20)) > 9, (
        "requests were swapped inside their prompts"
    )


def run_told_requests(seed: int) -> int:
    """Requests that come back with all or less than they had; how many left inside their prompts."""
    draw = random.Random(seed)
    manager = KVCacheManager(one_layer_each(full(BLOCK)), 13)
    scheduler = Scheduler(manager, max_batch_tokens=draw.choice([3, 7, 40]), max_seqs=3, max_positions=99)
    taker = Taker(scheduler)
    states: list[RequestState] = []
    for n in range(8):
        prompt = tuple(draw.randrange(50) for _ in range(draw.randint(1, 30)))
        sampling = SamplingParams(max_tokens=draw.randint(1, 12), prompt_logprobs=draw.choice([None, 0, 2]))
        states.append(scheduler.add(Request(request_id=str(n), prompt_token_ids=prompt, sampling=sampling)))
    partly_told = 0
    for _ in range(2000):
        for request_id in [s.request_id for s in states if f"swap {s.request_id}" in manager.leases]:
            taker.left(request_id)
        for state in states:
            num_tokens = draw.choice([state.num_computed, draw.randint(0, state.num_computed)])
            if scheduler.may_return(state.request_id) and draw.random() < 0.4:
                if num_tokens and manager.reserve_live(state.request_id, num_tokens) is None:
                    continue
                assert scheduler.come_back(state.request_id, num_tokens)
        before = [s.num_swaps for s in states]
        batch = scheduler.schedule()
        for state, num_swaps in zip(states, before, strict=True):
            partly_told += state.num_swaps > num_swaps and 1 < len(state.prompt_logprobs or ()) < len(
                state.request.prompt_token_ids
            )
        if batch is None:
            if not scheduler.has_work and not scheduler.num_away:
                break
            continue
        told = {s.request_id: told_for(s, states) for s in batch.requests}
        scheduler.update(batch, {s.request_id: 7 for s in batch.requests if s.needs_logits}, told)
    for state in states:
        assert len(state.output_token_ids) == state.request.sampling.max_tokens
        if state.request.sampling.prompt_logprobs is not None:
            assert state.prompt_logprobs is not None
            rest = [(e.token_id, e.logprob) for e in state.prompt_logprobs[1:] if e is not None]
            assert rest == [(token, -float(p)) for p, token in enumerate(state.request.prompt_token_ids)][1:]
    return partly_told


def told_for(share: ScheduledRequest, states: list[RequestState]) -> list[TokenLogprobs]:
    """What a step tells of one request's prompt."""
    return told_of(share, states[int(share.request_id)].request.prompt_token_ids)


def test_a_request_starts_behind_what_came_from_a_host_tier() -> None:
    scheduler = small_scheduler(8, max_batch_tokens=6)
    manager = scheduler.allocator
    assert isinstance(manager, KVCacheManager)
    asked = request("a", 12)
    assert max_cached_tokens(asked) == 11
    assert manager.reserve_live("a", 8) is not None
    state = scheduler.add_cached(asked, 8)
    batch = scheduler.schedule()
    assert batch is not None
    (share,) = batch.requests
    assert (share.num_computed_tokens, share.token_ids, share.num_filled_blocks) == (8, (8, 9, 10, 11), (2,))
    scheduler.update(batch, {"a": 5})
    assert (state.num_cached_tokens, state.num_recomputed_tokens) == (8, 0)
    assert (scheduler.num_looked_up_tokens, scheduler.num_found_tokens) == (12, 8)
    assert scheduler.num_prompt_tokens == 4


def test_a_cached_request_that_lost_its_blocks_first_found_nothing() -> None:
    scheduler = small_scheduler(4, max_seqs=1)
    manager = scheduler.allocator
    assert isinstance(manager, KVCacheManager)
    scheduler.add(request("a", 8))
    run(scheduler)
    assert manager.reserve_live("b", 8) is not None
    b = scheduler.add_cached(request("b", 9), 8)
    while scheduler.has_work:
        run(scheduler)
    assert (b.num_preemptions, b.num_cached_tokens, b.num_recomputed_tokens) == (1, 0, 0)
    assert (scheduler.num_looked_up_tokens, scheduler.num_found_tokens) == (17, 0)


def test_nothing_is_cached_of_a_prompt_that_is_told_of() -> None:
    asked = Request(
        request_id="a", prompt_token_ids=tuple(range(9)), sampling=SamplingParams(prompt_logprobs=0)
    )
    scheduler = small_scheduler(4)
    assert max_cached_tokens(asked) == 0
    assert scheduler.add(asked).max_cached_tokens == 0
    plain = request("b", 9)
    assert max_cached_tokens(plain) == scheduler.add(plain).max_cached_tokens == 8
    with pytest.raises(AssertionError, match="need not be computed"):
        scheduler.add_cached(asked, 4)
    with pytest.raises(AssertionError, match="need not be computed"):
        scheduler.add_cached(request("c", 9), 9)
