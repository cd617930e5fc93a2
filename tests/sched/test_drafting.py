"""Drafts take what others leave, count as far as they are accepted, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from rayk.kv.groups import max_request_blocks
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.sched.drafting import Drafting, RanksDrafter
from rayk.sched.quiet import num_quiet_steps
from rayk.sched.request_state import RequestState
from rayk.types.batch import Rollback, ScheduledBatch
from rayk.types.drafting import NOTHING, DraftShare
from rayk.types.request import FinishReason, Request, SamplingParams
from rayk.types.speculative import DraftCounts
from tests.kv.brute import full
from tests.sched.world import BLOCK, one_layer_each, state

TOKEN = 5
"""What the model always says."""
WRONG = 6
EOS = 90


class Says:
    """A drafter that says the same every time."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.num_tokens = len(tokens)

    def propose(self, state: RequestState, num_tokens: int) -> list[int]:
        return self.tokens[:num_tokens]


def make(num_blocks: int, drafts: Sequence[int], **changes: Any) -> Scheduler:
    """One group of attention with blocks of 4 tokens, and of states with blocks of so many; `num_blocks`
    usable ones."""
    caching, states = changes.pop("prefix_caching", False), changes.pop("states", ())
    groups = one_layer_each(full(BLOCK), *map(state, states))
    manager = KVCacheManager(groups, num_blocks + 1, prefix_caching=caching)
    limits = {"max_batch_tokens": 64, "max_seqs": 4, "max_positions": 100} | changes
    drafting = Drafting(Says(*drafts), manager, has_states=bool(states))
    return Scheduler(manager, drafting=drafting, **limits)


def request(request_id: str, num_prompt: int, max_tokens: int = 20, **sampling: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(10, 10 + num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
    )


def plan(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def settle(scheduler: Scheduler, batch: ScheduledBatch, model: int = TOKEN) -> list[RequestState]:
    """Account for a step of a model that always says `model`."""
    accepted: dict[str, list[int]] = {}
    for share in (r for r in batch.requests if r.num_drafts):
        drafts = share.token_ids[1:]
        agreed = next((i for i, d in enumerate(drafts) if d != model), len(drafts))
        accepted[share.request_id] = [model] * (agreed + 1)
    sampled = {r.request_id: model for r in batch.requests if r.needs_logits and not r.num_drafts}
    done = scheduler.update(batch, sampled, None, accepted)
    scheduler.check_integrity()
    return done


def sizes(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    """Who is in a step, with how many tokens, and how many of them proposed."""
    return [(r.request_id, len(r.token_ids), r.num_drafts) for r in batch.requests]


def test_a_step_gives_what_was_accepted_and_one_more() -> None:
    scheduler = make(20, [TOKEN, TOKEN, 6])
    drafted = scheduler.add(request("a", 6))
    first = plan(scheduler)
    assert sizes(first) == [("a", 6, 0)], "the first token is not known"
    settle(scheduler, first)
    batch = plan(scheduler)
    assert sizes(batch) == [("a", 4, 3)]
    assert batch.requests[0].token_ids == (TOKEN, TOKEN, TOKEN, 6)
    assert batch.requests[0].num_logits == batch.num_logits == 4
    assert settle(scheduler, batch) == [drafted]
    assert (drafted.output_token_ids, drafted.num_new) == ([TOKEN] * 4, 3)
    assert drafted.num_computed == 9, "not the rejected one"
    assert scheduler.num_output_tokens == 4
    assert drafted.drafts == scheduler.drafting.counts == DraftCounts([1, 1, 1], [1, 1, 0])  # type: ignore[union-attr]
    assert plan(scheduler).requests[0].num_computed_tokens == 9, "it is overwritten"


def test_counts_by_position() -> None:
    counts = DraftCounts()
    for num_drafted, num_accepted in ((2, 0), (3, 3), (1, 1)):
        counts.add(num_drafted, num_accepted)
    assert (counts.drafted_at, counts.accepted_at) == ([3, 2, 1], [2, 1, 1])
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 6, 4)
    assert (DraftCounts().num_drafts, DraftCounts().num_accepted_tokens) == (0, 0)


def test_others_tokens_come_first() -> None:
    """A step of 10: two that decode, a chunk of a prompt, and no more than is left for drafts."""
    scheduler = make(40, [TOKEN] * 4, max_batch_tokens=10)
    scheduler.add(request("a", 2))
    scheduler.add(request("b", 2))
    settle(scheduler, plan(scheduler))
    scheduler.add(request("c", 11))
    steps = []
    for _ in range(3):
        batch = plan(scheduler)
        steps.append(sizes(batch))
        settle(scheduler, batch)
    assert steps == [
        [("a", 1, 0), ("b", 1, 0), ("c", 8, 0)],
        [("a", 5, 4), ("b", 2, 1), ("c", 3, 0)],
        [("a", 5, 4), ("b", 4, 3), ("c", 1, 0)],
    ]


@pytest.mark.parametrize(("num_blocks", "expected"), [(3, 1), (4, 4)])
def test_drafts_take_no_block_that_a_running_request_may_need(num_blocks: int, expected: int) -> None:
    """Blocks of 4; the prompt has 6 tokens: one slot is left behind the first output token. The last of 3
    blocks may be needed in the next step."""
    scheduler = make(num_blocks, [TOKEN] * 5)
    scheduler.add(request("a", 6, 6))
    settle(scheduler, plan(scheduler))
    batch = plan(scheduler)
    assert batch.requests[0].num_drafts == expected
    settle(scheduler, batch)


@pytest.mark.parametrize("num_more", [0, 1, 2, 5])
@pytest.mark.parametrize("states", [[], [1], [2], [3, 1]], ids=str)
def test_nobody_is_preempted_for_a_draft(states: list[int], num_more: int) -> None:
    """Drafts that are all wrong change nothing: as many preemptions and steps as without any. (Right ones
    bring a request to its next block sooner, perhaps before another has ended.)"""

    groups = one_layer_each(full(BLOCK), *map(state, states))
    num_blocks = max_request_blocks(groups, 15, 8) + num_more

    def course(drafts: list[int], *sizes: tuple[int, int]) -> tuple[int, int]:
        scheduler = make(num_blocks, drafts, states=states, max_batch_tokens=8)
        for name, (num_prompt, max_tokens) in zip("ab", sizes, strict=True):
            scheduler.add(request(name, num_prompt, max_tokens))
        while scheduler.has_work:
            settle(scheduler, plan(scheduler))
        assert scheduler.allocator.num_free_blocks == num_blocks
        return scheduler.num_preemptions, scheduler.num_steps

    all_sizes = list(product((3, 6), (3, 4, 9)))
    for sizes in product(all_sizes, repeat=2):
        assert course([WRONG] * 5, *sizes) == course([], *sizes), sizes


@pytest.mark.parametrize(
    ("max_tokens", "sampling", "drafts", "output", "reason"),
    [
        (3, {}, [TOKEN] * 6, 3, FinishReason.LENGTH),
        (20, {"stop_token_ids": (TOKEN,), "ignore_eos": True}, [TOKEN] * 6, 1, FinishReason.STOP),
    ],
)
def test_it_ends_where_it_would_have_ended(
    max_tokens: int, sampling: dict[str, Any], drafts: list[int], output: int, reason: FinishReason
) -> None:
    scheduler = make(20, drafts)
    drafted = scheduler.add(request("a", 4, max_tokens, **sampling))
    while scheduler.has_work:
        batch = plan(scheduler)
        assert all(r.num_drafts < max_tokens for r in batch.requests)
        settle(scheduler, batch)
    assert (len(drafted.output_token_ids), drafted.finish_reason) == (output, reason)
    assert drafted.num_computed == len(drafted.tokens) - 1


def test_what_follows_the_end_inside_a_draft_is_cut() -> None:
    scheduler = make(20, [TOKEN, EOS, TOKEN, TOKEN], eos_token_ids=[EOS])
    drafted = scheduler.add(request("a", 4))
    settle(scheduler, plan(scheduler))
    batch = plan(scheduler)
    assert scheduler.update(batch, {}, None, {"a": [TOKEN, EOS, TOKEN, TOKEN, TOKEN]}) == [drafted]
    assert (drafted.output_token_ids, drafted.num_new) == ([TOKEN, TOKEN, EOS], 2)
    assert drafted.finish_reason is FinishReason.STOP
    assert drafted.num_computed == 4 + 2, "all but the last token"
    assert drafted.drafts == DraftCounts([1] * 4, [1] * 4), "the model agreed to all"
    assert scheduler.allocator.num_free_blocks == 20


class Fragile:
    """The form of an output that cannot go on after so many tokens: it fails at the next one."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens
        self.error: str | None = None

    def feed(self, token_id: int) -> bool:
        self.left -= 1
        self.error = "too complex" if self.left < 0 else None
        return False

    def num_taken(self, token_ids: Sequence[int]) -> int:
        return max(1, min(self.left, len(token_ids)))


def test_a_form_fails_at_the_token_that_it_would_fail_at_without_drafts() -> None:
    """Tokens before it are told, and it is the first of a later step."""
    scheduler = make(20, [TOKEN] * 4)
    drafted = scheduler.add(request("a", 6))
    drafted.form = form = Fragile(8)
    outputs = []
    while form.error is None:
        (state,) = settle(scheduler, plan(scheduler))
        outputs.append((state.num_new, len(state.output_token_ids), form.error))
    assert outputs == [(1, 1, None), (5, 6, None), (2, 8, None), (1, 9, "too complex")]


def test_positions_end_drafts() -> None:
    scheduler = make(20, [TOKEN] * 6, max_positions=10)
    drafted = scheduler.add(request("a", 5, 50))
    while scheduler.has_work:
        batch = plan(scheduler)
        assert all(r.num_computed_tokens + len(r.token_ids) < 10 for r in batch.requests)
        settle(scheduler, batch)
    assert len(drafted.tokens) == 10


def test_rejected_tokens_are_never_found_in_the_prefix_cache() -> None:
    scheduler = make(20, [6, 6, 6, 6], prefix_caching=True)
    scheduler.add(request("a", 7, 6))
    while scheduler.has_work:
        settle(scheduler, plan(scheduler))
    prompt = request("a", 7).prompt_token_ids

    def found(output: list[int]) -> int:
        tokens = [*prompt, *output, 0, 0, 0, 0, 0]
        num_found = scheduler.allocator.match("probe", tokens, len(tokens) - 1)
        scheduler.allocator.free("probe")
        return num_found

    assert found([TOKEN] * 5) == 12
    assert found([6, 6, 6, 6, 6]) == 4
    assert found([TOKEN, 6, 6, 6, 6]) == 8


@pytest.mark.parametrize("size", [1, 2, 5])
def test_states_are_rolled_back_where_drafts_cross_their_blocks_too(size: int) -> None:
    """Of three drafts the first counts: every step keeps two tokens, wherever blocks of states end. The state
    that the next step goes on from is there, and those before it are not."""
    manager = KVCacheManager(one_layer_each(full(BLOCK), state(size)), 60)
    drafting = Drafting(Says(TOKEN, WRONG, TOKEN), manager, has_states=True)
    limits = {"max_batch_tokens": 64, "max_seqs": 2, "max_positions": 100}
    scheduler = Scheduler(manager, drafting=drafting, **limits)
    drafted = scheduler.add(request("a", 6, 20))
    settle(scheduler, plan(scheduler))
    seen = []
    while drafted.num_tokens_left > 4:
        batch = plan(scheduler)
        (share,) = batch.requests
        settle(scheduler, batch)
        seen.append((share.num_computed_tokens, share.num_drafts))
        assert drafting.take_rollbacks() == (Rollback(share.row, 2),)
        _, table = manager.block_tables("a")
        last = (share.num_computed_tokens + 1) // size
        assert table[last] != 0 == sum(table[:last])
    assert seen == [(start, 3) for start in range(6, 22, 2)]
    while scheduler.has_work:
        settle(scheduler, plan(scheduler))
    assert not drafting.has_rollbacks, "of a request that is over"


def test_nobody_goes_back_in_blocks_that_others_may_have() -> None:
    """A request that is gone when ranks next hear of anything; one that was handed over with its blocks is
    taken back."""
    for keep_blocks in (False, True):
        manager = KVCacheManager(one_layer_each(full(BLOCK), state(5)), 60)
        drafting = Drafting(Says(WRONG), manager, has_states=True)
        scheduler = Scheduler(manager, drafting=drafting, max_batch_tokens=64, max_seqs=2, max_positions=100)
        scheduler.add(request("a", 6))
        settle(scheduler, plan(scheduler))
        batch = plan(scheduler)
        settle(scheduler, batch)
        scheduler.remove("a", keep_blocks=keep_blocks)
        kept = (Rollback(batch.requests[0].row, 1),)
        assert drafting.take_rollbacks() == (kept if keep_blocks else ())


def test_an_abort_in_flight_leaves_nothing() -> None:
    scheduler = make(20, [6, 6, 6])
    scheduler.add(request("a", 6))
    settle(scheduler, plan(scheduler))
    batch = plan(scheduler)
    scheduler.remove("a")
    assert settle(scheduler, batch) == []
    assert scheduler.allocator.num_free_blocks == 20
    assert not scheduler.drafting.has_rollbacks  # type: ignore[union-attr]


def test_steps_with_drafts_are_not_taken_at_once() -> None:
    quiet = make(40, [TOKEN])
    quiet.add(request("a", 6))
    settle(quiet, plan(quiet))
    assert num_quiet_steps(quiet, 16) == 0
    quiet.drafting = None
    assert num_quiet_steps(quiet, 16) > 0


def make_on_ranks(num_blocks: int, num_tokens: int, *, lacks: bool = False, **changes: Any) -> Scheduler:
    """The same of a drafter on ranks."""
    manager = KVCacheManager(one_layer_each(full(BLOCK)), num_blocks + 1)
    limits = {"max_batch_tokens": 64, "max_seqs": 4, "max_positions": 100} | changes
    drafting = Drafting(RanksDrafter(num_tokens), manager, lacks_rows=lambda _: lacks)
    return Scheduler(manager, drafting=drafting, **limits)


def test_ranks_propose_when_a_step_is_known_and_the_next_one_verifies() -> None:
    scheduler = make_on_ranks(20, 3)
    assert scheduler.drafting is not None
    state = scheduler.add(request("a", 6))
    batch = plan(scheduler)
    settle(scheduler, batch)
    ((kept, after, asked, updates, *_),) = scheduler.plan_drafts(batch)
    assert (kept, after, asked) == (6, TOKEN, 3)
    ((start, ids),) = updates
    assert (start, len(ids)) == (2, 1), "two blocks have room for 8 tokens, and 10 there may be"
    assert scheduler.allocator.block_tables("a")[0][2:] == ids
    scheduler.drafting.take([[TOKEN, TOKEN, 6]])
    batch = plan(scheduler)
    (share,) = batch.requests
    assert (share.token_ids, share.num_drafts) == ((TOKEN, TOKEN, TOKEN, 6), 3)
    assert share.new_block_ids == ((3, ()),), "ranks have them"
    settle(scheduler, batch)
    assert state.output_token_ids == [TOKEN] * 4
    ((kept, after, asked, *_),) = scheduler.plan_drafts(batch)
    assert (kept, after, asked) == (3, TOKEN, 3)
    batch = plan(scheduler)
    assert sizes(batch) == [("a", 1, 0)], "what was proposed of fewer tokens counts no more"


def test_ranks_fill_rows_of_chunks_and_of_requests_that_end() -> None:
    scheduler = make_on_ranks(20, 3, max_batch_tokens=4)
    scheduler.add(request("a", 6, max_tokens=1))
    batch = plan(scheduler)
    settle(scheduler, batch)
    assert scheduler.plan_drafts(batch) == (DraftShare(4, 14, 0),), "the prompt goes on"
    batch = plan(scheduler)
    settle(scheduler, batch)
    assert scheduler.plan_drafts(batch) == (DraftShare(2, TOKEN, 0),), "it is over"


def test_ranks_propose_nothing_without_rows_of_the_first_tokens() -> None:
    scheduler = make_on_ranks(20, 3, lacks=True)
    scheduler.add(request("a", 6))
    batch = plan(scheduler)
    settle(scheduler, batch)
    assert scheduler.plan_drafts(batch) == (NOTHING,), "rows behind would take others for right"


def test_ranks_propose_as_far_as_there_are_blocks_and_tokens_left() -> None:
    short = make_on_ranks(2, 3)
    short.add(request("a", 6, max_tokens=2))
    batch = plan(short)
    settle(short, batch)
    assert short.plan_drafts(batch) == (DraftShare(6, TOKEN, 0),), "the last token needs none before it"
    short = make_on_ranks(2, 3)
    short.add(request("a", 5, max_tokens=4))
    batch = plan(short)
    settle(short, batch)
    assert short.plan_drafts(batch) == (DraftShare(5, TOKEN, 2),), "8 tokens have room"
    short = make_on_ranks(2, 3)
    short.add(request("a", 6, max_tokens=4))
    batch = plan(short)
    settle(short, batch)
    assert short.plan_drafts(batch) == (DraftShare(6, TOKEN, 1),), "a third block would be another's"


def test_ranks_get_no_blocks_for_drafts_while_one_waits_that_may_start() -> None:
    """Blocks of 4: one more token has room, and a fourth is behind the next block's border."""
    scheduler = make_on_ranks(20, 3)
    scheduler.add(request("a", 6))
    batch = plan(scheduler)
    scheduler.add(request("b", 6))
    settle(scheduler, batch)
    assert scheduler.plan_drafts(batch) == (DraftShare(6, TOKEN, 1),)
    scheduler.drafting.take([[TOKEN]])  # type: ignore[union-attr]
    batch = plan(scheduler)
    assert sizes(batch) == [("a", 2, 1), ("b", 6, 0)]
    settle(scheduler, batch)
    a, b = scheduler.plan_drafts(batch)
    assert (a.num_proposed, b.num_proposed) == (3, 3), "nobody waits"
    assert [len(ids) for share in (a, b) for _, ids in share.new_block_ids] == [1, 1]


def test_blocks_of_who_just_left_go_to_nobody_before_their_last_rows_are_there() -> None:
    scheduler = make_on_ranks(20, 3)
    scheduler.add(request("a", 6, max_tokens=1))
    scheduler.add(request("b", 6))
    batch = plan(scheduler)
    settle(scheduler, batch)
    assert scheduler.plan_drafts(batch) == (DraftShare(6, TOKEN, 0), DraftShare(6, TOKEN, 1))


class Rows:
    """Says which requests lack rows of a drafter, and hears when they have them."""

    def __init__(self, *lacking: str) -> None:
        self.lacking = set(lacking)

    def lacks(self, request_id: str) -> bool:
        return request_id in self.lacking

    def have(self, request_id: str) -> None:
        self.lacking.remove(request_id)


def make_lacking(rows: Rows, num_tokens: int = 3, **changes: Any) -> Scheduler:
    """Ranks draft, and compute from tokens what they lack."""
    manager = KVCacheManager(one_layer_each(full(BLOCK)), 41)
    limits = {"max_batch_tokens": 64, "max_seqs": 4, "max_positions": 100} | changes
    drafting = Drafting(
        RanksDrafter(num_tokens),
        manager,
        lacks_rows=rows.lacks,
        have_rows=rows.have,
        most_rows=limits["max_batch_tokens"],
    )
    return Scheduler(manager, drafting=drafting, **limits)


def test_rows_that_lack_are_computed_from_tokens_as_steps_have_room() -> None:
    """A step of 4 computes 4 rows, one more than tokens come: the fourth step's are the last."""
    rows = Rows("a")
    scheduler = make_lacking(rows, max_batch_tokens=4)
    state = scheduler.add_prefilled(request("a", 10), [TOKEN])
    assert scheduler.allocator.extend("a", 10) is not None
    tokens, shares = [*range(10, 20), TOKEN], []
    for _ in range(3):
        batch = plan(scheduler)
        settle(scheduler, batch)
        tokens.append(TOKEN)
        shares += scheduler.plan_drafts(batch)
    assert [(s.first_row, s.token_ids, s.next_token) for s in shares] == [
        (0, tuple(tokens[0:4]), tokens[4]),
        (4, tuple(tokens[4:8]), tokens[8]),
        (8, tuple(tokens[8:12]), tokens[12]),
    ]
    assert [s.num_kept for s in shares] == [4, 4, 4]
    assert [s.num_proposed for s in shares] == [0, 0, 0], "13 tokens are computed"
    assert rows.lacking
    batch = plan(scheduler)
    settle(scheduler, batch)
    (share,) = scheduler.plan_drafts(batch)
    assert (share.first_row, share.token_ids, share.num_proposed) == (12, (TOKEN, TOKEN), 3)
    assert not rows.lacking
    assert state.num_rows_refilled == 14
    batch = plan(scheduler)
    settle(scheduler, batch)
    (share,) = scheduler.plan_drafts(batch)
    assert (share.token_ids, share.num_kept) == ((), 1), "from now on its rows are those of its steps"
    assert scheduler.drafting is not None
    assert scheduler.drafting.told(state)["draft_kv"] == "recomputed"
