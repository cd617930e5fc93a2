"""Continuous batching with chunked prefill; preemption by swapping, or by recompute of what the prefix cache
has lost.

A request has `tokens` (prompt, then generated) and `num_computed` of them have KV. A step computes the next
tokens of as many requests as the token budget and the blocks allow; a request that has computed all its
tokens samples one more. Prefill chunks, decode steps and recomputation after a preemption are thus one case.
Where there is a swapper (swapping.py), it may take a preempted request's KV and bring it back later.

A step may be scheduled while the one before it is in flight: its requests then have tokens that nobody knows
yet, UNKNOWN_TOKEN in the batch, for which the ranks put what that step samples. Such a request may turn out
to be over; what was computed for it since is dropped. Nobody is preempted while a step is in flight.

Pipeline stages work on as many steps at once. A request's next token is then unknown until its step has left
the last stage, so it waits for that, and others take the steps between: running requests are spread over as
many steps as there are stages. Early stages still write for a request that is aborted meanwhile, so its
blocks come free when its last step is accounted for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import mul

from rayk.sched.drafting import Drafting
from rayk.sched.request_state import RequestState, max_cached_tokens
from rayk.sched.swapping import AwayRequests, Swapper
from rayk.types.allocator import BlockAllocator, BlockUpdates
from rayk.types.batch import UNKNOWN_TOKEN, ScheduledBatch, ScheduledRequest
from rayk.types.drafting import DraftPlan
from rayk.types.request import Request, TokenLogprobs

_NO_TOKENS: frozenset[int] = frozenset()


class Scheduler:
    """Decides each step's batch. First come, first served; the latest arrival is preempted first.

    Running requests are in order of arrival and came before all others. A waiting request may hold blocks
    (its KV was prefilled elsewhere, or swapped in): short blocks are taken from such requests first, latest
    first, so that none of them can wait for another for ever.

    With a swapper, one request at a time gives its blocks: who needs them pauses while they are copied out,
    and no second victim is taken until they came free. Those that came after an away request wait for it.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_batch_tokens: int,
        max_seqs: int,
        max_positions: int,
        eos_token_ids: Iterable[int] = (),
        num_stages: int = 1,
        drafting: Drafting | None = None,
    ) -> None:
        assert max_batch_tokens >= 1
        assert max_seqs >= 1
        assert num_stages >= 1
        self.allocator = allocator
        # called for each request of a finished step while its blocks are all there
        self.on_computed: Callable[[RequestState], None] | None = None
        # called with the number of each finished step
        self.on_settled: Callable[[int], None] | None = None
        self.swapper: Swapper | None = None  # takes KV of preempted requests; None: they are computed again
        self.drafting = drafting  # None: nothing is proposed
        self.max_batch_tokens = max_batch_tokens
        self.max_positions = max_positions
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # prompt tokens computed, also those computed again
        self.num_output_tokens = 0  # tokens sampled
        # tokens of new requests' prompts, and those that the prefix cache had
        self.num_looked_up_tokens = self.num_found_tokens = 0
        self.is_short_of_blocks = False
        """Whether a request lacked blocks in the last `schedule`; one from elsewhere may then take none."""
        self.needs_settling = False
        """Whether a running request lacked blocks in the last `schedule`, beside a step in flight: the next
        one may preempt, once there is none."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._admitted: list[RequestState] = []
        self._in_flight: dict[int, list[RequestState]] = {}
        """Step -> the requests of its batch, in its order, until it is accounted for."""
        self._settled: list[RequestState] = []
        """The requests of the step that was accounted for last."""
        self._num_stages = num_stages
        self._late: dict[int, dict[str, Callable[[], None]]] = {}
        """Step -> removed requests, with what ends them when it is accounted for."""
        self._rows = list(range(max_seqs - 1, -1, -1))
        self._away = AwayRequests()
        self._num_arrivals = 0
        self._step = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Sequence[RequestState]:
        """The requests that have a row, in order of arrival."""
        return self._running

    def is_steady(self, *, is_head_short: bool) -> bool:
        """Tell whether the next step is for running requests alone and nobody hears of it but through
        `update`; the others cannot be admitted until one of these is over. One step of all that run may be
        in flight. For sched/quiet.py."""
        num_running = len(self._running)
        can_admit = self._has_room and not is_head_short
        is_watched = self.on_computed is not None or self.on_settled is not None
        is_busy = self._num_stages > 1 or len(self._away) or len(self._in_flight) > 1
        is_other = self.drafting is not None
        is_other |= any(states != self._running for states in self._in_flight.values())
        is_held_up = can_admit or is_watched or is_busy or is_other
        return 0 < num_running <= self.max_batch_tokens and not is_held_up

    @property
    def _has_room(self) -> bool:
        """Whether a step has a row and a token left for the first that waits."""
        return bool(self._waiting and self._rows) and len(self._running) < self.max_batch_tokens

    @property
    def is_head_short(self) -> bool:
        """Tell whether the first that waits, which there is room for, lacks blocks beside requests that
        decode. Steps ask for them again and again; where a prefix may be found that is not without effect,
        and this is false."""
        if not self._has_room or self.allocator.finds_prefixes:
            return False
        state, budget = self._waiting[0], self.max_batch_tokens - len(self._running)
        num_tokens = state.num_computed + min(len(state.tokens) - state.num_computed, budget)
        return (
            self.allocator.num_missing_blocks(state.request_id, num_tokens) > self.allocator.num_free_blocks
        )

    def count_decodes(self, num_steps: int) -> None:
        """Count steps in which every running request got a token, without `schedule` and `update`: see
        sched/quiet.py, which does the rest. A step in flight is as many steps later one of the same."""
        self._step += num_steps
        self._in_flight = {step + num_steps: states for step, states in self._in_flight.items()}
        self.num_output_tokens += num_steps * len(self._running)
        self.is_short_of_blocks, self.needs_settling = self.is_head_short, False

    @property
    def num_steps(self) -> int:
        """Count the steps so far: the number of the last one."""
        return self._step

    @property
    def num_waiting(self) -> int:
        """Count requests that wait for a row or for blocks."""
        return len(self._waiting)

    @property
    def num_away(self) -> int:
        """Count requests whose KV the swapper has."""
        return len(self._away)

    @property
    def num_swaps(self) -> int:
        """Count preempted requests whose KV the swapper took."""
        return self._away.num_swaps

    @property
    def num_in_flight(self) -> int:
        """Count the steps that are scheduled and not accounted for."""
        return len(self._in_flight)

    def holds(self, request_id: str) -> bool:
        """Tell whether blocks of a removed request wait for its last step."""
        return any(request_id in late for late in self._late.values())

    @property
    def has_work(self) -> bool:
        """Tell whether any request is waiting or running; away ones need nothing until they are back."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> RequestState:
        """Queue a new request."""
        prompt, sampling = list(request.prompt_token_ids), request.sampling
        eos = _NO_TOKENS if sampling.ignore_eos else self._eos_token_ids
        most = min(len(prompt) + sampling.max_tokens, self.max_positions)
        state = RequestState(request, eos, prompt, len(prompt), most)
        state.num_cached_tokens = 0
        state.arrival = self._num_arrivals
        self._num_arrivals += 1
        if sampling.prompt_logprobs is not None:
            state.prompt_logprobs = [None]
        self._waiting.append(state)
        return state

    def add_prefilled(
        self, request: Request, output_token_ids: Iterable[int], num_computed: int | None = None
    ) -> RequestState:
        """Queue a request that was prefilled elsewhere, with the tokens sampled so far.

        `num_computed`: prompt tokens whose KV is in its blocks, by default all; those after them are computed
        again. A request that has none must have no blocks.
        """
        num_prompt = len(request.prompt_token_ids)
        state = self.add(request)
        state.tokens += output_token_ids
        state.prompt_logprobs = state.num_cached_tokens = None  # told where the prompt was computed
        state.num_computed = num_prompt if num_computed is None else num_computed
        state.num_prompt_seen = num_prompt
        assert 0 <= state.num_computed <= num_prompt, "tokens of the prompt"
        return state

    def add_cached(self, request: Request, num_computed: int) -> RequestState:
        """Queue a new request, blocks of which hold KV already: that of the first `num_computed` tokens, at
        most `max_cached_tokens(request)`. A request that has none must have no blocks."""
        assert 0 <= num_computed <= max_cached_tokens(request), "tokens that need not be computed"
        state = self.add(request)
        state.num_computed = num_computed
        return state

    def remove(
        self, request_id: str, *, keep_blocks: bool = False, then: Callable[[], None] | None = None
    ) -> RequestState | None:
        """Forget a request (aborted, or handed over with `keep_blocks`). None if it is not here. The blocks
        of one that is away are its swapper's. `then`: called in place of freeing its blocks, once no stage
        writes them any more."""
        if (away := self._away.take(request_id)) is not None:
            assert self.swapper is not None
            self.swapper.forget(request_id)
            return away
        for queue in (self._running, self._waiting):
            found = next((state for state in queue if state.request_id == request_id), None)
            if found is not None:
                self._leave(queue, found, keep_blocks=keep_blocks, then=then)
                return found
        return None

    def finish(self, state: RequestState) -> None:
        """Let a running request leave that has its last token."""
        self._leave(self._running, state)

    def _leave(
        self,
        queue: list[RequestState] | deque[RequestState],
        state: RequestState,
        *,
        keep_blocks: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        queue.remove(state)
        last_step = self._last_step(state) if self._num_stages > 1 else None
        if self.drafting is not None and not keep_blocks and then is None:
            self.drafting.forget(state.row)
        self._release_row(state)
        if keep_blocks:
            return
        end = then or partial(self.allocator.free, state.request_id)
        if last_step is not None:
            self._late.setdefault(last_step, {})[state.request_id] = end
        else:
            end()

    def _last_step(self, state: RequestState) -> int | None:
        """Find the last step in flight that computes tokens of a request."""
        steps = (step for step, states in self._in_flight.items() if any(s is state for s in states))
        return max(steps, default=None)

    def blocks_left(self, request_id: str) -> None:
        """The swapper: an away request's blocks are free. Requests that are not away have none."""
        self._away.blocks_left(request_id)

    def may_return(self, request_id: str) -> bool:
        """The swapper: whether an away request may take free blocks now to get its KV back. Not while one
        that came before it lacks blocks, waits or is away, lest it take theirs again and again."""
        first = self._away.first()
        if first is None or first.request_id != request_id or self._away.is_leaving(request_id):
            return False
        is_next = not self._waiting or first.arrival < self._waiting[0].arrival
        return is_next and not self.is_short_of_blocks

    def make_room(self, request_id: str) -> bool:
        """The swapper: `may_return`, but blocks are short. With none running, nobody's end brings any: the
        latest waiting request that holds blocks gives its (soon, if it is swapped out itself). Whether one
        does now; those that wait came later."""
        can = self.may_return(request_id) and not self._running and not self._away.any_leaving
        return can and self._take_from_waiting(keep=None)

    def come_back(self, request_id: str, num_computed: int | None = None) -> bool:
        """The swapper: the KV of an away request's first `num_computed` tokens, by default as many as it had,
        is in blocks that it holds; if of none, it holds none. False: it is not away, the blocks stay the
        caller's."""
        state = self._away.take(request_id)
        if state is None:
            return False
        num_had = state.num_computed
        state.num_computed = num_had if num_computed is None else num_computed
        assert 0 <= state.num_computed <= num_had, "tokens that it had"
        if state.num_computed < num_had:
            self._count_preemption(state)
        self._enqueue(state)
        return True

    def start_over(self, request_id: str) -> bool:
        """The swapper: an away request's KV is lost, it holds no blocks and computes its tokens again. False:
        it is not away."""
        return self.come_back(request_id, 0)

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step's batch, or None when nothing can run now."""
        if self.needs_settling and self._in_flight:
            return None
        budget, num_decodes = self.max_batch_tokens, 0
        most_decodes = self._most_decodes()
        self.is_short_of_blocks = self.needs_settling = False
        scheduled: list[ScheduledRequest] = []
        states: list[RequestState] = []
        index = 0
        while index < len(self._running) and budget > 0:
            state = self._running[index]
            index += 1
            num_begun = state.num_computed + state.num_ahead
            num_left = len(state.tokens) + state.num_sampled_ahead - num_begun
            may_go_on = not state.num_sampled_ahead or self._may_go_on(state)
            if not may_go_on or (num_left == 1 and num_decodes == most_decodes):
                continue
            num_tokens = min(num_left, budget)
            updates: BlockUpdates | None = state.no_updates
            if num_begun + num_tokens > state.num_covered:
                updates = self._extend_or_preempt(state, num_begun + num_tokens)
            if self.needs_settling:
                break  # those behind it would be preempted for it
            if updates is None:
                continue  # it pauses, or was preempted itself: then all behind it were before.
            scheduled.append(self._share(state, num_tokens, updates))
            states.append(state)
            budget -= num_tokens
            num_decodes += num_left == 1
        if not (self.is_short_of_blocks and self._running):
            # Else a preempted request would come back at once, only to be preempted again.
            budget = self._admit(scheduled, states, budget)
        if not scheduled:
            return None
        if self.drafting is not None:
            self.drafting.add(scheduled, states, budget, self._num_spare_blocks(), self.extend)
        self._step += 1
        self._in_flight[self._step] = states
        return ScheduledBatch(step=self._step, requests=tuple(scheduled))

    def plan_drafts(self, batch: ScheduledBatch) -> DraftPlan:
        """Say what a drafter on ranks does now that a step was accounted for, and its tokens were told."""
        assert self.drafting is not None
        # The next step may start one that waits: blocks are its first.
        num_blocks = 0 if self._has_room else self._num_spare_blocks()
        return self.drafting.plan(batch, self._settled, num_blocks, self.extend)

    def _num_spare_blocks(self) -> int:
        """Count the blocks that nobody needs in this step, nor those that run in the next one."""
        if self.is_short_of_blocks:
            return 0
        return self.allocator.num_free_blocks - len(self._running) * self.allocator.max_new_blocks(1)

    def _most_decodes(self) -> int:
        """Count the running requests of which a step computes one token: the others are for the steps that
        the other stages work on."""
        return -(-len(self._running) // self._num_stages)

    def _may_go_on(self, state: RequestState) -> bool:
        """Tell whether more of a request may be computed though a step in flight samples its next token."""
        is_known = self._num_stages > 1 or self.drafting is not None  # its next token, before it goes on
        return not is_known and state.may_go_on

    def scheduled(self, batch: ScheduledBatch) -> list[RequestState]:
        """List the requests of a batch that was not accounted for yet, in its order, those included that
        have left since."""
        return self._in_flight[batch.step]

    @property
    def sampling(self) -> Iterator[RequestState]:
        """Yield requests whose next token is sampled by a step in flight."""
        return (state for state in self._running if state.num_sampled_ahead)

    def take_admitted(self) -> list[RequestState]:
        """List requests that `schedule` took out of the queue since the last call, returned ones included."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def update(
        self,
        batch: ScheduledBatch,
        sampled: Mapping[str, int],
        prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] | None = None,
        accepted: Mapping[str, Sequence[int]] | None = None,
    ) -> list[RequestState]:
        """Account for a finished step, in the order of steps. `accepted`: what requests with drafts
        got. Returns the requests that got a token; finished ones have left."""
        got_token: list[RequestState] = []
        drafts = self.drafting is not None
        if self.on_settled is not None:
            self.on_settled(batch.step)
        self._settled = self._in_flight.pop(batch.step)
        for share, state in zip(batch.requests, self._settled, strict=True):
            if state.row is None:
                continue  # aborted while the step ran, or over with the step before
            if drafts and share.num_drafts:
                is_change = self._take_verified(state, share, accepted)
                got_token.append(state)
            else:
                is_change = self._computed(state, share, len(share.token_ids))
                if prompt_logprobs and state.prompt_logprobs is not None:
                    state.prompt_logprobs += prompt_logprobs.get(share.request_id, ())
                if share.needs_logits:
                    state.num_new = 1
                    state.append(sampled[share.request_id])
                    self.num_output_tokens += 1
                    got_token.append(state)
            if self.on_computed is not None:
                self.on_computed(state)
            if state.finish_reason is not None:
                self.finish(state)
            elif is_change:
                self.trim(state)
        self._end_late(batch.step)
        return got_token

    def _end_late(self, step: int) -> None:
        """End requests that were removed while stages worked on their last step."""
        for end in self._late.pop(step, {}).values():
            end()

    def _take_verified(
        self, state: RequestState, share: ScheduledRequest, accepted: Mapping[str, Sequence[int]] | None
    ) -> bool:
        """Give a request what its draft came to; returns what `_computed` does."""
        assert self.drafting is not None
        assert accepted is not None, "a step with drafts was not verified"
        num_vain = self.drafting.settle(state, share, accepted[share.request_id])
        self.num_output_tokens += state.num_new
        return self._computed(state, share, len(share.token_ids) - num_vain)

    def check_integrity(self) -> None:
        rows = [state.row for state in self._running] + self._rows
        assert len(set(rows)) == len(rows), "a row is held twice"
        assert None not in rows, "a running request has no row"
        order = [state.arrival for state in (*self._running, *self._waiting)]
        assert order == sorted(set(order)), "requests are out of their order"
        assert not any(map(self._away.precedes, self._running)), "a request ran before an earlier one"
        self.allocator.check_integrity()

    def extend(self, state: RequestState, num_tokens: int) -> BlockUpdates | None:
        """Get blocks for `num_tokens` of a request; None if they are short. The tables of one that runs
        change here and in `trim` alone: until it has more than `num_covered` there is nothing to ask for."""
        updates = self.allocator.extend(state.request.request_id, num_tokens)
        if updates is not None:
            ends = [start + len(ids) for start, ids in updates]
            state.num_covered = min(map(mul, ends, self.allocator.block_sizes))
            state.no_updates = tuple([(end, ()) for end in ends])
        return updates

    def _computed(self, state: RequestState, share: ScheduledRequest, num_tokens: int) -> bool:
        """Note that its first `num_tokens` tokens of a step were computed; tells whether a block is full, or
        dead, with them."""
        start = share.num_computed_tokens
        stop = start + num_tokens
        num_prompt = state.num_prompt
        if start < num_prompt:
            self.num_prompt_tokens += min(stop, num_prompt) - start
        state.advance(start, stop)
        state.num_sampled_ahead -= share.needs_logits
        is_change = stop >= state.next_change
        if is_change:
            self.remember(state)
        return is_change

    def remember(self, state: RequestState) -> None:
        """Let others find the blocks that a request has filled."""
        salt = state.request.cache_salt
        self.allocator.remember(state.request_id, state.tokens, state.num_computed, salt)

    def trim(self, state: RequestState) -> None:
        """Free what no later token reads, and note when there is more to do, here or in `remember`."""
        self.allocator.trim(state.request_id, state.num_computed)
        state.next_change = self.allocator.next_change(state.request_id)

    def _extend_or_preempt(self, state: RequestState, num_tokens: int) -> BlockUpdates | None:
        """Get blocks for `num_tokens`, preempting the latest arrivals; None when `state` itself had to go, or
        pauses while blocks are copied out or a step is in flight."""
        while (updates := self.extend(state, num_tokens)) is None:
            self.is_short_of_blocks = True
            if self._away.any_leaving:
                return None
            if self._take_from_waiting(keep=None):
                continue
            if self._in_flight:
                self.needs_settling = True
                return None
            victim = self._running.pop()
            self._release_row(victim)
            self._preempt(victim)
            if victim is state:
                return None
        return updates

    def _take_from_waiting(self, keep: RequestState | None) -> bool:
        """Take the blocks of the latest waiting request that holds any, `keep` aside; False if none does."""
        for state in reversed(self._waiting):
            if state.num_computed > 0 and state is not keep:
                self._waiting.remove(state)
                self._preempt(state)
                return True
        return False

    def _preempt(self, state: RequestState) -> None:
        """Let the swapper take the request, or let it wait to compute its tokens again."""
        if state.num_computed > 0 and self._away.send(state, self.swapper):
            return
        self.allocator.free(state.request_id)
        state.num_computed = 0
        self._count_preemption(state)
        self._enqueue(state)

    def _count_preemption(self, state: RequestState) -> None:
        state.num_preemptions += 1
        self.num_preemptions += 1

    def _enqueue(self, state: RequestState) -> None:
        later = (i for i, other in enumerate(self._waiting) if other.arrival > state.arrival)
        self._waiting.insert(next(later, len(self._waiting)), state)

    def _admit(self, scheduled: list[ScheduledRequest], states: list[RequestState], budget: int) -> int:
        """Start waiting requests while rows, tokens and blocks last; returns the tokens that are left."""
        while self._waiting and self._rows and budget > 0:
            state = self._waiting[0]
            if self._away.precedes(state):
                break
            is_new = state.num_computed == 0
            if is_new:
                max_tokens = state.max_cached_tokens
                state.num_computed = self.allocator.match(
                    state.request_id, state.tokens, max_tokens, state.request.cache_salt
                )
            num_tokens = min(len(state.tokens) - state.num_computed, budget)
            updates = self.extend(state, state.num_computed + num_tokens)
            if updates is None:
                self.is_short_of_blocks = True
                if is_new and state.num_computed:
                    self.allocator.unmatch(state.request_id)
                    state.num_computed = 0
                # A running request's end brings blocks, or one that leaves; else later arrivals give theirs.
                may_take = not self._running and not self._away.any_leaving
                if may_take and self._take_from_waiting(keep=state):
                    continue
                break
            self._waiting.popleft()
            if state.num_cached_tokens is not None and not state.was_admitted:
                state.num_cached_tokens = min(state.num_computed, state.num_prompt)
                self.num_looked_up_tokens += state.num_prompt
                self.num_found_tokens += state.num_cached_tokens
            state.was_admitted = True
            state.row = self._rows.pop()
            self._running.append(state)
            self._admitted.append(state)
            scheduled.append(self._share(state, num_tokens, updates))
            states.append(state)
            budget -= num_tokens
        return budget

    def _share(self, state: RequestState, num_tokens: int, updates: BlockUpdates) -> ScheduledRequest:
        filled: tuple[int, ...] = ()
        if not state.tables_sent:
            filled = tuple(start for start, _ in updates)
            updates = tuple((0, table) for table in self.allocator.block_tables(state.request_id))
            state.tables_sent = True
        assert state.row is not None
        start = state.num_computed + state.num_ahead
        end = start + num_tokens
        token_ids: tuple[int, ...]
        if num_tokens == 1:  # nearly always
            token_ids = (state.tokens[start] if start < len(state.tokens) else UNKNOWN_TOKEN,)
        else:
            known = tuple(state.tokens[start:end])
            token_ids = known + (UNKNOWN_TOKEN,) * (num_tokens - len(known))
        share = ScheduledRequest(
            request_id=state.request_id,
            row=state.row,
            num_computed_tokens=start,
            token_ids=token_ids,
            new_block_ids=updates,
            num_filled_blocks=filled,
            needs_logits=end == len(state.tokens) + state.num_sampled_ahead,
            prompt_logits=(0, 0) if state.prompt_logprobs is None else state.prompt_logits(num_tokens),
        )
        state.num_ahead += num_tokens
        state.num_sampled_ahead += share.needs_logits
        return share

    def _release_row(self, state: RequestState) -> None:
        if state.row is not None:
            self._rows.append(state.row)
            state.row = None
        state.tables_sent = False
        state.num_covered = state.next_change = state.num_draft_rows = 0
        state.num_ahead = state.num_sampled_ahead = 0
