"""Hold a request as the scheduler of one engine knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayk.sched.ngram import NgramIndex
from rayk.types.allocator import BlockUpdates
from rayk.types.request import FinishReason, Request, TokenLogprobs
from rayk.types.speculative import DraftCounts


class StopText(Protocol):
    """Watches one request's output for its stop strings."""

    def feed(self, token_id: int) -> str | None:
        """Take the next output token; returns the stop string that it completes, or None."""


class OutputForm(Protocol):
    """Watches whether one request's output has the form that it must have. Its leader reads the rest."""

    def feed(self, token_id: int) -> bool:
        """Take the next output token; tells whether the output is complete with it."""

    def num_taken(self, token_ids: Sequence[int]) -> int:
        """Count the first of these tokens that the output could take before it cannot go on; at least one."""


@dataclass(slots=True, eq=False)
class RequestState:
    """A request inside one engine. Filled and changed by the Scheduler only."""

    request: Request
    eos_token_ids: frozenset[int]  # that end it
    tokens: list[int]  # of the prompt, then of the output
    num_prompt: int  # of them
    most_tokens: int  # with so many it is over, whatever they are
    num_computed: int = 0
    # tokens after these that steps in flight compute, and tokens that they sample: see Scheduler
    num_ahead: int = 0
    num_sampled_ahead: int = 0
    # whether it may leave with its next token, so that nothing is computed before that is known
    waits_for_token: bool = False
    row: int | None = None
    arrival: int = 0  # its number among all that came to the scheduler: lower ones go first
    num_preemptions: int = 0  # times its KV was given up, at least in part
    num_swaps: int = 0  # times a swapper took its KV
    was_admitted: bool = False  # whether it ran here at some time
    # first prompt tokens computed at some time, here or where the request was prefilled
    num_prompt_seen: int = 0
    num_recomputed_tokens: int = 0  # prompt tokens that were computed here though they had been before
    # prompt tokens that the prefix cache had at admission; None: prefilled elsewhere
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    stop_text: StopText | None = None
    form: OutputForm | None = None
    # for the prompt tokens so far, the first being None; None: not asked for, or told elsewhere
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    submitted_ns: int | None = None  # when it came to this engine; this and what follows is its leader's
    first_step_ns: int | None = None  # when the step began that first took it
    first_info: dict[str, Any] = field(default_factory=dict)  # further news of its first token
    is_reported: bool = False  # whether a token of it was reported here
    tables_sent: bool = False  # whether the ranks hold this request's block tables (in its row)
    # while it runs: tokens that its blocks have room for, and what there is to say of its tables up to there
    num_covered: int = 0
    no_updates: BlockUpdates = ()
    next_change: int = 0  # computed tokens at which a block of it is to be remembered or trimmed
    lookup: NgramIndex | None = None  # where its tokens were seen before, if the drafter of the engine asks
    drafts: DraftCounts | None = None  # None: nothing was proposed for it here
    # what ranks proposed, and how many tokens it had then; and for each the logits that it was drawn from
    proposals: tuple[int, tuple[int, ...]] = (0, ())
    drawn_from: Sequence[Any] = ()
    # the first proposals of ranks: output tokens before, and what was proposed
    noted: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    # whether a drafter on ranks lacks rows of its first tokens
    lacks_draft_rows: bool = False
    # first rows that it computed since the request has a row, of those that lacked; how many in all
    num_draft_rows: int = 0
    num_rows_refilled: int = 0
    is_undrafted: bool = False  # nothing was proposed for it, and nothing will be: these rows lack
    num_new: int = 1  # tokens that it got at once, when it last got any

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_begun(self) -> int:
        """Count the tokens that are computed, or in a step in flight."""
        return self.num_computed + self.num_ahead

    @property
    def num_tokens(self) -> int:
        """Count the tokens, those included that a step in flight samples."""
        return len(self.tokens) + self.num_sampled_ahead

    @property
    def may_go_on(self) -> bool:
        """Tell whether more is to be computed before the tokens in flight are known: not where they are the
        last, as far as one can tell."""
        if not self.num_sampled_ahead:
            return True
        return not self.waits_for_token and self.num_tokens < self.most_tokens

    def advance(self, start: int, stop: int) -> None:
        """Note that tokens `start` to `stop` were computed here, and all before them exist."""
        self.num_ahead -= stop - start
        self.num_computed = stop
        num_prompt = self.num_prompt
        if start >= num_prompt:
            self.num_prompt_seen = num_prompt
            return
        end = min(stop, num_prompt)
        self.num_recomputed_tokens += max(0, min(end, self.num_prompt_seen) - start)
        self.num_prompt_seen = max(end, self.num_prompt_seen)

    @property
    def max_cached_tokens(self) -> int:
        """Count first tokens that need no computing if their KV is there: the last one's logits are sampled,
        and logits of prompt tokens may still have to be told."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt:
            return len(self.tokens) - 1
        return len(self.prompt_logprobs) - 1

    def token_at(self, position: int) -> int | None:
        """Return the token at a position; None where it is not known yet."""
        return self.tokens[position] if position < len(self.tokens) else None

    @property
    def num_tokens_left(self) -> int:
        """Count the tokens that it gets yet, if none of them ends it."""
        return self.most_tokens - len(self.tokens)

    def append_all(self, tokens: list[int]) -> None:
        """Take sampled tokens, of which none but the last may end the request. Nobody watches its text."""
        ends, stops = self.eos_token_ids, self.request.sampling.stop_token_ids
        if stops:
            ends = ends.union(stops)
        num_tokens = len(self.tokens) + len(tokens)
        if num_tokens < self.most_tokens and ends.isdisjoint(tokens):
            self.tokens += tokens
            return
        assert num_tokens <= self.most_tokens, "it gets fewer tokens"
        assert ends.isdisjoint(tokens[:-1]), "it had ended before"
        self.tokens += tokens[:-1]
        self.append(tokens[-1])

    def append_until_end(self, tokens: Sequence[int]) -> int:
        """Take sampled tokens, any of which may end the request: none after that is taken. Nor is one that
        its form fails at, but for the first: a later step comes to it. Returns how many were taken."""
        if self.form is not None and len(tokens) > 1:
            tokens = tokens[: self.form.num_taken(tokens)]
        self.num_new = 0
        for token in tokens:
            self.append(token)
            self.num_new += 1
            if self.finish_reason is not None:
                break
        return self.num_new

    def append(self, token: int) -> None:
        """Take a sampled token and decide whether the request is finished."""
        self.tokens.append(token)
        stop_string = self.stop_text.feed(token) if self.stop_text is not None else None
        is_complete = self.form is not None and self.form.feed(token)
        if token in self.eos_token_ids:
            self.finish_reason = FinishReason.STOP
        elif token in self.request.sampling.stop_token_ids:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token
        elif stop_string is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop_string
        elif is_complete:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) >= self.most_tokens:
            self.finish_reason = FinishReason.LENGTH

    def prompt_logits(self, num_tokens: int) -> tuple[int, int]:
        """Find, of the next `num_tokens` to begin, those whose logits are still to be told."""
        if self.prompt_logprobs is None:
            return (0, 0)
        # Logits of position i are about token i + 1; after a preemption some are known already.
        start = max(0, len(self.prompt_logprobs) - 1 - self.num_begun)
        stop = min(num_tokens, self.num_prompt - 1 - self.num_begun)
        return (start, stop) if start < stop else (0, 0)


def max_cached_tokens(request: Request) -> int:
    """Count the same for a new request; see `RequestState.max_cached_tokens`."""
    return 0 if request.sampling.prompt_logprobs is not None else len(request.prompt_token_ids) - 1
