"""Continuous batching with chunked prefill; preemption by recompute, of what the prefix cache has lost.

A request has `tokens` (prompt, then generated) and `num_computed` of them have KV. A step computes the next
tokens of as many requests as the token budget and the blocks allow; a request that has computed all its
tokens samples one more. Prefill chunks, decode steps and recomputation after a preemption are thus one case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rayk.types.allocator import BlockAllocator, BlockUpdates
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.request import FinishReason, Request, TokenLogprobs


class StopText(Protocol):
    """Watches one request's output for its stop strings."""

    def feed(self, token_id: int) -> str | None:
        """Take the next output token; the stop string that it completes, or None."""
        ...


@dataclass(slots=True)
class RequestState:
    """A request inside one engine. Filled and changed by the Scheduler only."""

    request: Request
    eos_token_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    row: int | None = None
    num_preemptions: int = 0
    num_prompt_seen: int = 0
    """First prompt tokens that were computed at some time, here or where the request was prefilled."""
    num_recomputed_tokens: int = 0
    """Prompt tokens that were computed here though they had been before."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache had when it was first admitted; None where the prompt was prefilled
    elsewhere."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    stop_text: StopText | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Of the prompt tokens so far, the first being None; None: not asked for, or told elsewhere."""
    submitted_ns: int | None = None
    """When it came to this engine; this and what follows is its leader's."""
    first_step_ns: int | None = None
    """When the step began that first took it."""
    is_told: bool = False
    """Whether a token of it was told here."""
    tables_sent: bool = False
    """Whether the ranks hold this request's block tables (in its row)."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.request.prompt_token_ids) :]

    def advance(self, start: int, stop: int) -> None:
        """Tokens `start` to `stop` were computed here, and all before them exist."""
        end = min(stop, len(self.request.prompt_token_ids))
        self.num_computed = stop
        self.num_recomputed_tokens += max(0, min(end, self.num_prompt_seen) - start)
        self.num_prompt_seen = max(end, self.num_prompt_seen)

    @property
    def max_cached_tokens(self) -> int:
        """First tokens that nobody need compute if their KV is there: not the last one, whose logits are
        sampled, nor those whose logits tell of a prompt token nobody was told of yet."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == len(self.request.prompt_token_ids):
            return len(self.tokens) - 1
        return len(self.prompt_logprobs) - 1

    def append(self, token: int, max_positions: int) -> None:
        """Take a sampled token and decide whether the request is finished."""
        self.tokens.append(token)
        sampling = self.request.sampling
        num_output = len(self.tokens) - len(self.request.prompt_token_ids)
        stop_string = self.stop_text.feed(token) if self.stop_text is not None else None
        if token in self.eos_token_ids and not sampling.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif token in sampling.stop_token_ids:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token
        elif stop_string is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop_string
        elif num_output >= sampling.max_tokens or len(self.tokens) >= max_positions:
            self.finish_reason = FinishReason.LENGTH

    def prompt_logits(self, num_tokens: int) -> tuple[int, int]:
        """Of the next `num_tokens`, those whose logits tell of a prompt token nobody was told of yet."""
        if self.prompt_logprobs is None:
            return (0, 0)
        # Logits of position i are about token i + 1; after a preemption some are known already.
        start = max(0, len(self.prompt_logprobs) - 1 - self.num_computed)
        stop = min(num_tokens, len(self.request.prompt_token_ids) - 1 - self.num_computed)
        return (start, stop) if start < stop else (0, 0)


class Scheduler:
    """Decides each step's batch. First come, first served; the latest arrival is preempted first.

    Running requests are in order of arrival and came before all waiting ones. A waiting request may hold
    blocks (its KV was prefilled elsewhere): short blocks are taken from such requests first, latest first,
    so that none of them can wait for another for ever.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_batch_tokens: int,
        max_seqs: int,
        max_positions: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        assert max_batch_tokens >= 1
        assert max_seqs >= 1
        self.allocator = allocator
        self.max_batch_tokens = max_batch_tokens
        self.max_positions = max_positions
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Prompt tokens computed, also those computed again."""
        self.num_output_tokens = 0
        """Tokens sampled."""
        self.num_looked_up_tokens = self.num_found_tokens = 0
        """Prompt tokens of new requests, and those of them that the prefix cache had."""
        self.is_short_of_blocks = False
        """Whether a request could not go on in the last `schedule` because blocks were short."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._admitted: list[RequestState] = []
        self._rows = list(range(max_seqs - 1, -1, -1))
        self._step = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row or for blocks."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> RequestState:
        """Queue a new request."""
        state = RequestState(request, self._eos_token_ids, list(request.prompt_token_ids))
        state.num_cached_tokens = 0
        if request.sampling.prompt_logprobs is not None:
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

    def remove(self, request_id: str, *, keep_blocks: bool = False) -> RequestState | None:
        """Forget a request (aborted, or handed over with `keep_blocks`). None if it is not here."""
        for queue in (self._running, self._waiting):
            for state in queue:
                if state.request_id == request_id:
                    queue.remove(state)
                    self._release_row(state)
                    if not keep_blocks:
                        self.allocator.free(request_id)
                    return state
        return None

    def schedule(self) -> ScheduledBatch | None:
        """The next step's batch, or None when nothing can run now."""
        budget = self.max_batch_tokens
        self.is_short_of_blocks = False
        scheduled: list[ScheduledRequest] = []
        index = 0
        while index < len(self._running) and budget > 0:
            state = self._running[index]
            num_tokens = min(len(state.tokens) - state.num_computed, budget)
            updates = self._extend_or_preempt(state, state.num_computed + num_tokens)
            if updates is None:
                break  # state itself was preempted; all behind it were before.
            scheduled.append(self._share(state, num_tokens, updates))
            budget -= num_tokens
            index += 1
        if not (self.is_short_of_blocks and scheduled):
            # Else a preempted request would come back at once, only to be preempted again.
            self._admit(scheduled, budget)
        if not scheduled:
            return None
        self._step += 1
        return ScheduledBatch(step=self._step, requests=tuple(scheduled))

    def scheduled(self, batch: ScheduledBatch) -> list[RequestState]:
        """The requests of a batch that was not accounted for yet, in its order."""
        by_id = {state.request_id: state for state in self._running}
        return [by_id[share.request_id] for share in batch.requests]

    def take_admitted(self) -> list[RequestState]:
        """Requests that `schedule` took out of the queue since the last call, also those that came back."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def update(
        self,
        batch: ScheduledBatch,
        sampled: Mapping[str, int],
        prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] | None = None,
    ) -> list[RequestState]:
        """Account for a finished step. Returns the requests that got a token; finished ones have left."""
        got_token: list[RequestState] = []
        by_id = {state.request_id: state for state in self._running}
        for share in batch.requests:
            state = by_id.get(share.request_id)
            if state is None:
                continue  # aborted while the step ran
            start = share.num_computed_tokens
            stop = start + len(share.token_ids)
            num_prompt = len(state.request.prompt_token_ids)
            self.num_prompt_tokens += max(0, min(stop, num_prompt) - start)
            state.advance(start, stop)
            self.allocator.remember(state.request_id, state.tokens, state.num_computed)
            if prompt_logprobs and state.prompt_logprobs is not None:
                state.prompt_logprobs += prompt_logprobs.get(share.request_id, ())
            if share.needs_logits:
                state.append(sampled[share.request_id], self.max_positions)
                self.num_output_tokens += 1
                got_token.append(state)
            if state.finish_reason is not None:
                self.remove(state.request_id)
            else:
                self.allocator.trim(state.request_id, state.num_computed)
        return got_token

    def check_integrity(self) -> None:
        """Rows are held once; blocks add up. AssertionError otherwise."""
        rows = [state.row for state in self._running] + self._rows
        assert len(set(rows)) == len(rows), "a row is held twice"
        assert None not in rows, "a running request has no row"
        self.allocator.check_integrity()

    def _extend_or_preempt(self, state: RequestState, num_tokens: int) -> BlockUpdates | None:
        """Blocks for `num_tokens`, preempting the latest arrivals; None when `state` itself had to go."""
        while (updates := self.allocator.extend(state.request_id, num_tokens)) is None:
            self.is_short_of_blocks = True
            if self._take_from_waiting(keep=None):
                continue
            victim = self._running.pop()
            self._release_row(victim)
            self._forget_kv(victim)
            self._waiting.appendleft(victim)
            if victim is state:
                return None
        return updates

    def _take_from_waiting(self, keep: RequestState | None) -> bool:
        """Free the blocks of the latest waiting request that holds any, `keep` aside; False if none does."""
        for state in reversed(self._waiting):
            if state.num_computed > 0 and state is not keep:
                self._forget_kv(state)
                return True
        return False

    def _forget_kv(self, state: RequestState) -> None:
        """The request computes its tokens again, from the first, when it runs next."""
        self.allocator.free(state.request_id)
        state.num_computed = 0
        state.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Start waiting requests while rows, tokens and blocks last."""
        while self._waiting and self._rows and budget > 0:
            state = self._waiting[0]
            is_new = state.num_computed == 0
            if is_new:
                wanted = state.max_cached_tokens
                state.num_computed = self.allocator.match(state.request_id, state.tokens, wanted)
            num_tokens = min(len(state.tokens) - state.num_computed, budget)
            updates = self.allocator.extend(state.request_id, state.num_computed + num_tokens)
            if updates is None:
                self.is_short_of_blocks = True
                if is_new and state.num_computed:
                    self.allocator.unmatch(state.request_id)
                    state.num_computed = 0
                # Blocks come back when a running request ends; with none, later arrivals give theirs.
                if not self._running and self._take_from_waiting(keep=state):
                    continue
                break
            self._waiting.popleft()
            if state.num_cached_tokens is not None and not state.num_preemptions:
                num_prompt = len(state.request.prompt_token_ids)
                state.num_cached_tokens = min(state.num_computed, num_prompt)
                self.num_looked_up_tokens += num_prompt
                self.num_found_tokens += state.num_cached_tokens
            state.row = self._rows.pop()
            self._running.append(state)
            self._admitted.append(state)
            scheduled.append(self._share(state, num_tokens, updates))
            budget -= num_tokens

    def _share(self, state: RequestState, num_tokens: int, updates: BlockUpdates) -> ScheduledRequest:
        held: tuple[int, ...] = ()
        if not state.tables_sent:
            held = tuple(start for start, _ in updates)
            updates = tuple((0, table) for table in self.allocator.block_tables(state.request_id))
            state.tables_sent = True
        assert state.row is not None
        end = state.num_computed + num_tokens
        return ScheduledRequest(
            request_id=state.request_id,
            row=state.row,
            num_computed_tokens=state.num_computed,
            token_ids=tuple(state.tokens[state.num_computed : end]),
            new_block_ids=updates,
            num_held_blocks=held,
            needs_logits=end == len(state.tokens),
            prompt_logits=state.prompt_logits(num_tokens),
        )

    def _release_row(self, state: RequestState) -> None:
        if state.row is not None:
            self._rows.append(state.row)
            state.row = None
        state.tables_sent = False
