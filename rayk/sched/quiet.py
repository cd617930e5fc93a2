"""Take many decode steps of a scheduler at once, where they decide nothing.

A step is quiet if each running request decodes one token in it, nobody is admitted or preempted and none of
them lacks a block. Requests may end in the last of the steps that are taken at once. Blocks are handed out,
named and freed inside, in the order in which single steps do it, so that all is afterwards as it were after
as many calls of `schedule` and `update`. Only who gives the tokens must know them: a simulation does, an
engine not.

Where each step is scheduled while the one before is in flight, one is in flight before and after, as many
steps later (`later_batch`). Nobody ends then: who may is not in the step behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from rayk.sched.batching import Scheduler
from rayk.sched.request_state import RequestState
from rayk.types.batch import UNKNOWN_TOKEN, ScheduledBatch, ScheduledRequest

_EXTEND, _SETTLE = 0, 1
"""What is due in a step: blocks for a request before it, names and ends of blocks, and of requests, after."""


def num_quiet_steps(scheduler: Scheduler, limit: int, *, until_freed: bool = False) -> int:
    """Count the quiet steps that come now, up to `limit`; 0: take a single one.

    `limit`: where something ends a request before its `max_tokens`, which is not known here, the last of so
    many steps must be the one. `until_freed`: somebody waits for blocks, and none may come free before the
    last of the steps ends. The count holds until the scheduler, or the blocks, are touched; so do all lower
    ones.
    """
    is_head_short = scheduler.is_head_short
    if limit <= 0 or not scheduler.is_steady(is_head_short=is_head_short):
        return 0
    num_ahead = scheduler.num_in_flight
    found = limit + num_ahead
    for state in scheduler.running:
        # Its next step computes its last token, and nobody looks at what comes of it before the step after.
        if len(state.tokens) - state.num_computed != 1 or state.num_ahead != num_ahead:
            return 0
        if state.waits_for_token or state.stop_text is not None or state.form is not None:
            return 0
        if state.num_computed < state.num_prompt:
            return 0
        if (num := state.num_tokens_left) < found:
            found = num
    found -= num_ahead
    if until_freed or is_head_short:  # a block that is freed in a step may be what it lacks
        found = min(found, *(state.next_change - state.num_computed for state in scheduler.running))
    return _num_with_blocks(scheduler, found) if found > 0 else 0


def advance(
    scheduler: Scheduler,
    num_steps: int,
    tokens: Sequence[list[int]],
    watch: Callable[[int], object] | None = None,
) -> list[RequestState]:
    """Take quiet steps, no more than `num_quiet_steps` says. Returns the requests that ended with the last
    one, in the order of the batch.

    `tokens`: of each running request, in order, those of the steps. Only the last may end it. `watch`: called
    after a step, from 0, in which blocks changed hands; the others leave the blocks as they were.
    """
    scheduler.count_decodes(num_steps)
    return _QuietSteps(scheduler, num_steps, watch).carry_out(tokens)


def later_batch(batch: ScheduledBatch, num_steps: int) -> ScheduledBatch:
    """Return the batch of a decode step so many steps later, as `Scheduler.update` takes it: the requests
    that it has are in all of them."""
    requests = (
        ScheduledRequest(
            request_id=r.request_id,
            row=r.row,
            num_computed_tokens=r.num_computed_tokens + num_steps,
            token_ids=(UNKNOWN_TOKEN,),
            new_block_ids=r.new_block_ids,
            needs_logits=True,
        )
        for r in batch.requests
    )
    return ScheduledBatch(step=batch.step + num_steps, requests=tuple(requests))


def _num_with_blocks(scheduler: Scheduler, limit: int) -> int:
    """Count steps for which there are blocks, those aside that come free meanwhile."""
    allocator, running = scheduler.allocator, scheduler.running
    num_free, num_ahead = allocator.num_free_blocks, scheduler.num_in_flight
    if len(running) * allocator.max_new_blocks(limit) <= num_free:
        return limit

    def num_missing(num_steps: int) -> int:
        num_steps += num_ahead
        return sum(
            allocator.num_missing_blocks(state.request_id, state.num_computed + num_steps)
            for state in running
            if state.num_computed + num_steps > state.num_covered
        )

    return bisect_right(range(1, limit + 1), num_free, key=num_missing)


class _QuietSteps:
    """What is due in quiet steps: by step, all that is handed out before what settles, and by place in the
    batch, as in single steps."""

    def __init__(
        self, scheduler: Scheduler, num_steps: int, watch: Callable[[int], object] | None = None
    ) -> None:
        self._states = list(scheduler.running)
        self._scheduler = scheduler
        self._watch = watch
        self._starts = [state.num_computed for state in self._states]
        self._num_steps = num_steps
        self._num_ahead = scheduler.num_in_flight
        self._due: list[tuple[int, int, int]] = []
        """(step, kind, index of the request)"""

    def carry_out(self, tokens: Sequence[list[int]]) -> list[RequestState]:
        """Give each request its tokens, and hand out, name and free blocks. Returns those that ended."""
        num_steps, ended = self._num_steps, []
        for index, (state, new) in enumerate(zip(self._states, tokens, strict=True)):
            state.append_all(new)
            state.num_computed += num_steps
            if state.num_covered < state.num_computed + self._num_ahead:
                self._note_extend(index)
            if state.finish_reason is not None:
                ended.append(state)
            if state.next_change <= state.num_computed or state.finish_reason is not None:
                self._note_settle(index, 0)
        while self._due:
            step, kind, index = heappop(self._due)
            num_computed = self._starts[index] + step + 1
            if kind == _EXTEND:
                updates = self._scheduler.extend(self._states[index], num_computed + self._num_ahead)
                assert updates is not None, "a request lacks blocks in a quiet step"
                self._note_extend(index)
            else:
                self._settle(index, step, num_computed)
            if self._watch is not None and (not self._due or self._due[0][0] != step):
                self._watch(step)
        return ended

    def _note_extend(self, index: int) -> None:
        step = self._states[index].num_covered - self._starts[index] - self._num_ahead
        if step < self._num_steps:
            heappush(self._due, (step, _EXTEND, index))

    def _note_settle(self, index: int, begin: int) -> None:
        state = self._states[index]
        step = max(begin, state.next_change - self._starts[index] - 1)
        if state.finish_reason is not None:
            step = min(step, self._num_steps - 1)
        if step < self._num_steps:
            heappush(self._due, (step, _SETTLE, index))

    def _settle(self, index: int, step: int, num_computed: int) -> None:
        state = self._states[index]
        end, state.num_computed = state.num_computed, num_computed
        if num_computed >= state.next_change:
            self._scheduler.remember(state)
        if step == self._num_steps - 1 and state.finish_reason is not None:
            assert not self._num_ahead, "it is in the step in flight"
            self._scheduler.finish(state)
        else:
            self._scheduler.trim(state)
            self._note_settle(index, step + 1)
        state.num_computed = end
