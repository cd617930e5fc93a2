"""Drafts: tokens that are proposed after a request's last one, and computed with it in one step.

A step of 1 + d tokens gives as many tokens as the model agrees to, and one more. What was computed beyond is
overwritten by the next step; a recurrent state is rolled back. Drafts take what the other requests of a step
leave, tokens and blocks: nobody waits, or is preempted, for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from rayk.sched.ngram import NgramIndex
from rayk.sched.request_state import RequestState
from rayk.types.allocator import BlockAllocator, BlockUpdates
from rayk.types.batch import Rollback, ScheduledBatch, ScheduledRequest
from rayk.types.drafting import NOTHING, DraftPlan, DraftShare
from rayk.types.speculative import DraftCounts

MOST_NOTED = 64
"""Proposals of a request that are kept for who compares them."""
_SURE: Mapping[int, Sequence[Any]] = MappingProxyType({})
_NONE: tuple[int, ...] = ()


class Drafter(Protocol):
    """Proposes the tokens after a request's last one, which is known."""

    @property
    def num_tokens(self) -> int:
        """The most tokens that it proposes at once."""

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        """Propose up to so many tokens, one after the other; none where it knows none."""


class NgramDrafter:
    """Proposes what followed the same tokens earlier in the request."""

    def __init__(self, num_tokens: int, shortest: int, longest: int) -> None:
        """Take the limits of SpeculativeConfig."""
        self.num_tokens = num_tokens
        self._shortest, self._longest = shortest, longest

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        if state.lookup is None:
            state.lookup = NgramIndex(state.tokens, self._shortest, self._longest)
        return state.lookup.propose(state.tokens, num_tokens)


class RanksDrafter:
    """Proposes what a drafter on ranks did when the request got its last token: see Drafting.plan."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        num_known, proposals = state.proposals
        return proposals[:num_tokens] if num_known == len(state.tokens) else ()


class Drafting:
    """Adds drafts to the steps of one scheduler, and accounts for them."""

    def __init__(
        self,
        drafter: Drafter,
        allocator: BlockAllocator,
        *,
        has_states: bool = False,
        lacks_rows: Callable[[str], bool] = lambda request_id: False,
        have_rows: Callable[[str], None] | None = None,
        most_rows: int = 0,
        draws: bool = False,
        most_positions: int | None = None,
    ) -> None:
        """`has_states`: whether some KV groups keep recurrent states. `lacks_rows`: whether a drafter on
        ranks has no KV of a request's first tokens; it then proposes nothing for it. `have_rows`: called with
        a request when such a drafter is about to have computed what it lacked; None: it cannot, or is not to.
        It computes up to `most_rows` rows after a step. `draws`: one on ranks draws where the request does.
        `most_positions`: of a request, that one on ranks was made for; it goes on from no later one. None: it
        has no such bound."""
        self.counts = DraftCounts()
        """Counts the drafts of all requests."""
        self._drafter = drafter
        self._on_ranks = isinstance(drafter, RanksDrafter)
        self._allocator = allocator
        self._has_states = has_states
        self._rollbacks: dict[int, Rollback] = {}  # by row
        self._lacks_rows, self._have_rows = lacks_rows, have_rows
        self._most_rows = most_rows
        self._draws = draws
        self._most_positions = sys.maxsize if most_positions is None else most_positions
        self.num_undrafted = 0
        """Counts requests that a drafter on ranks proposes nothing for, since it lacks rows of theirs."""
        self._asked: list[tuple[RequestState, int]] = []

    @property
    def asked(self) -> Sequence[tuple[RequestState, int]]:
        """The requests of the last plan for which tokens are to be proposed, and how many, until `take`."""
        return self._asked

    @property
    def has_rollbacks(self) -> bool:
        """Whether states of tokens that were not accepted stand in blocks."""
        return bool(self._rollbacks)

    def take_rollbacks(self) -> tuple[Rollback, ...]:
        """List what ranks are to do about such states before anything else, since the last call."""
        rollbacks, self._rollbacks = tuple(self._rollbacks.values()), {}
        return rollbacks

    def add(
        self,
        scheduled: list[ScheduledRequest],
        states: Sequence[RequestState],
        num_tokens: int,
        num_blocks: int,
        extend: Callable[[RequestState, int], BlockUpdates | None],
    ) -> None:
        """Add drafts to a step's requests, first come, first served, as far as the step has room for so many
        tokens and there are so many blocks to spare. `extend`: the scheduler's."""
        if self._on_ranks:
            for state in states:
                state.lacks_draft_rows = self._lacks_rows(state.request_id)
        for index, state in enumerate(states):
            if num_tokens <= 0:
                return
            share = scheduled[index]
            limit = min(self._drafter.num_tokens, num_tokens, self._most_drafts(state, share))
            drafts = tuple(self._drafter.propose(state, limit)) if limit > 0 else ()
            if not drafts:
                continue
            stop = share.num_computed_tokens + 1
            end, updates = stop + len(drafts), share.new_block_ids
            if end > state.num_covered:
                num_missing = self._allocator.num_missing_blocks(state.request_id, end)
                if num_missing <= num_blocks:
                    more = extend(state, end)
                    assert more is not None, "there are blocks to spare"
                    updates, num_blocks = _joined(updates, more), num_blocks - num_missing
                else:
                    drafts = drafts[: max(0, state.num_covered - stop)]
            if drafts:
                token_ids = share.token_ids + drafts
                scheduled[index] = replace(
                    share, token_ids=token_ids, new_block_ids=updates, num_drafts=len(drafts)
                )
                state.num_ahead += len(drafts)
                num_tokens -= len(drafts)

    def _most_drafts(self, state: RequestState, share: ScheduledRequest) -> int:
        """Count the tokens that a step may compute behind a request's last one: none unless that is known,
        and all that is left of it to compute."""
        stop = share.num_computed_tokens + 1
        is_decode = share.needs_logits and stop == len(state.tokens) and len(share.token_ids) == 1
        if not is_decode or stop <= state.num_prompt or state.waits_for_token:
            return 0
        return state.num_tokens_left - 1

    def plan(
        self,
        batch: ScheduledBatch,
        states: Sequence[RequestState],
        num_blocks: int,
        extend: Callable[[RequestState, int], BlockUpdates | None],
    ) -> DraftPlan:
        """Say what a drafter on ranks does after a step of `states` that was just accounted for: rows for the
        tokens that count, those of requests included that have left since, whose blocks others may read; and
        proposals for those that go on, as far as there are so many blocks to spare for them. Of a request
        whose first rows lack, rows from the first one on where the drafter computes them from tokens, as many
        as the others' leave room for in a step; else none: they would take rows that lack for right.
        `extend`: the scheduler's."""
        self._asked = []
        found = []
        num_rows = max(0, self._most_rows - batch.num_tokens)
        if any(state.row is None for state in states):
            num_blocks = 0  # they may be blocks of these, which get their last rows in the same turn
        for share, state in zip(batch.requests, states, strict=True):
            num_kept = state.num_computed - share.num_computed_tokens
            first_row, token_ids = 0, _NONE
            if num_kept > 0 and state.lacks_draft_rows:
                first_row, token_ids = self._lacking(state, num_rows + len(share.token_ids))
                num_kept = len(token_ids)
                num_rows -= max(0, num_kept - len(share.token_ids))
            if num_kept <= 0:  # its logits were not finite, or it was aborted
                found.append(NOTHING)
                continue
            num_proposed, updates, num_taken = self._to_propose(state, share, num_blocks, extend)
            num_blocks -= num_taken
            if num_proposed:
                self._asked.append((state, num_proposed))
            next_token = state.tokens[first_row + num_kept if token_ids else state.num_computed]
            drawing = self._drawing(state)
            found.append(
                DraftShare(num_kept, next_token, num_proposed, updates, *drawing, first_row, token_ids)
            )
        return tuple(found)

    def _lacking(self, state: RequestState, num_rows: int) -> tuple[int, tuple[int, ...]]:
        """Return which tokens' rows are computed next of a request that lacks rows, at most so many: the
        position of the first, and the tokens. With the last one it lacks none."""
        if self._have_rows is None:
            self.num_undrafted += not state.is_undrafted
            state.is_undrafted = True
            return 0, _NONE
        if state.row is None:  # it has left
            return 0, _NONE
        first = state.num_draft_rows
        stop = min(state.num_computed, first + num_rows)
        state.num_draft_rows = stop
        state.num_rows_refilled += stop - first
        if stop == state.num_computed:
            state.lacks_draft_rows = False
            self._have_rows(state.request_id)
            # Blocks that were found without these rows now have them.
            salt = state.request.cache_salt
            self._allocator.remember(state.request_id, state.tokens, state.num_computed, salt)
            state.next_change = self._allocator.next_change(state.request_id)
        return first, tuple(state.tokens[first:stop])

    def _drawing(self, state: RequestState) -> tuple[float, int, int]:
        """Return temperature, seed and index of a request's DraftShare."""
        sampling = state.request.sampling
        if not self._draws or not sampling.temperature:
            return 0.0, 0, 0
        assert sampling.seed is not None, "the leader gives every drawn request a seed"
        return sampling.temperature, sampling.seed, len(state.tokens) - state.num_prompt

    def _to_propose(
        self,
        state: RequestState,
        share: ScheduledRequest,
        num_blocks: int,
        extend: Callable[[RequestState, int], BlockUpdates | None],
    ) -> tuple[int, BlockUpdates, int]:
        """Return how many tokens are to be proposed, and the blocks for them, and how many these are."""
        num_known = len(state.tokens)
        # Those that have no row have left.
        goes_on = share.needs_logits and state.row is not None and state.num_computed == num_known - 1
        if not goes_on or state.lacks_draft_rows:
            return 0, (), 0
        # The first proposal comes of the last known token's row.
        rows_left = self._most_positions - (num_known - 1)
        limit = max(0, min(self._drafter.num_tokens, state.num_tokens_left - 1, rows_left))
        end = num_known + limit
        if not limit or end <= state.num_covered:
            return limit, (), 0
        num_missing = self._allocator.num_missing_blocks(state.request_id, end)
        if num_missing > num_blocks:
            return max(0, min(limit, state.num_covered - num_known)), (), 0
        updates = extend(state, end)
        assert updates is not None, "there are blocks to spare"
        return limit, updates, num_missing

    def take(
        self, proposals: Sequence[Sequence[int]], drawn_from: Mapping[int, Sequence[Any]] = _SURE
    ) -> None:
        """Keep what ranks proposed for the requests of the last plan that asked for it, in their order.
        `drawn_from`: by place in this order, the logits that each token was drawn from, if it was."""
        for place, ((state, num_proposed), tokens) in enumerate(zip(self._asked, proposals, strict=True)):
            state.proposals = len(state.tokens), tuple(tokens[:num_proposed])
            state.drawn_from = drawn_from.get(place, ())
            if len(state.noted) < MOST_NOTED:
                state.noted.append((len(state.tokens) - state.num_prompt, state.proposals[1]))
        self._asked = []

    def told(self, state: RequestState) -> dict[str, Any]:
        """Return what there is to say of the drafts of a request that leaves, by names of EventInfo; nothing
        where no drafter is on ranks."""
        if not self._on_ranks:
            return {}
        if state.lacks_draft_rows:
            draft_kv = "none"
        elif state.num_rows_refilled:
            draft_kv = "recomputed"
        else:
            draft_kv = "own" if state.num_cached_tokens is not None else "moved"
        return {
            "draft_kv": draft_kv,
            "num_draft_rows_recomputed": state.num_rows_refilled,
            "proposals": tuple(state.noted),
        }

    def settle(self, state: RequestState, share: ScheduledRequest, tokens: Sequence[int]) -> int:
        """Give a request the drafts that were accepted and the token after them, up to its end. Returns how
        many tokens were computed in vain."""
        assert state.row is not None
        num_drafts = share.num_drafts
        assert 1 <= len(tokens) <= 1 + num_drafts, (tokens, num_drafts)
        num_kept = state.append_until_end(tokens)
        num_vain = 1 + num_drafts - num_kept
        state.num_ahead -= num_vain
        if state.drafts is None:
            state.drafts = DraftCounts()
        for counts in (self.counts, state.drafts):
            counts.add(num_drafts, len(tokens) - 1)
        if num_vain:
            self._take_back(state.row, num_kept)
        return num_vain

    def reject(self, state: RequestState, share: ScheduledRequest) -> None:
        """Take a request back to its last known token, which gave no other."""
        if share.num_drafts:
            assert state.row is not None
            self._take_back(state.row, len(share.token_ids) - share.num_drafts)

    def _take_back(self, row: int, num_kept: int) -> None:
        if self._has_states:
            self._rollbacks[row] = Rollback(row, num_kept)

    def forget(self, row: int | None) -> None:
        """Of a request that leaves: nobody reads its blocks any more, and others may have them before ranks
        hear of it. `row`: its own, if it has one."""
        if row is not None:
            self._rollbacks.pop(row, None)


def _joined(first: BlockUpdates, more: BlockUpdates) -> BlockUpdates:
    """Join the updates of two extensions, one after the other."""
    pairs = zip(first, more, strict=True)
    return tuple((start, ids + more_ids) for (start, ids), (_, more_ids) in pairs)
