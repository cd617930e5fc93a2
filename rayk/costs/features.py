"""Say what a step is made of, in the numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayk.models.config import DecoderConfig
from rayk.types.batch import ScheduledBatch, ScheduledRequest

StepKind = Literal["decode", "verify", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFeatures:
    """Sums over a step's requests, each of which computes n tokens after b whose KV exists."""

    num_requests: int
    num_tokens: int  # n
    num_logits: int  # tokens whose logits are computed
    num_prefills: int  # requests with n > 1, drafts aside, or b = 0
    num_pairs: int  # n * b + n * (n + 1) / 2: pairs of a token and one that it sees, itself included
    num_seen: int  # b + n: tokens whose KV is read
    num_drafts: int = 0  # of the tokens, those that were proposed
    windowed: tuple[tuple[int, int], ...] = ()  # per window of the model: (pairs, seen) within it

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token after others, and drafts behind it."""
        return self.num_prefills == 0

    @property
    def kind(self) -> StepKind:
        """Which class of steps it is of: `verify` is one of decodes, some of which have drafts. A prompt
        makes it `prefill` whatever else there is."""
        if self.num_prefills:
            return "prefill"
        return "verify" if self.num_drafts else "decode"


def step_features(batch: ScheduledBatch, windows: Sequence[int] = ()) -> StepFeatures:
    """Sum up a step. `windows`: the model's (`windows_of`)."""
    num_tokens = num_logits = num_prefills = num_pairs = num_seen = num_drafts = 0
    for r in batch.requests:
        n, before, drafts = len(r.token_ids), r.num_computed_tokens, r.num_drafts
        num_tokens += n
        num_drafts += drafts
        num_logits += r.num_logits + r.prompt_logits[1] - r.prompt_logits[0]
        num_prefills += n - drafts > 1 or not before
        num_pairs += n * before + n * (n + 1) // 2
        num_seen += before + n
    return StepFeatures(
        num_requests=len(batch.requests),
        num_tokens=num_tokens,
        num_logits=num_logits,
        num_prefills=num_prefills,
        num_pairs=num_pairs,
        num_seen=num_seen,
        num_drafts=num_drafts,
        windowed=tuple(in_window(batch, window) for window in windows),
    )


def step_of(
    shares: Sequence[tuple[int, int]], windows: Sequence[int] = (), *, num_drafts: int = 0
) -> StepFeatures:
    """Sum up a step whose requests compute (n, after b others) and whose last tokens are all sampled; of each
    one's n the last `num_drafts` are proposed."""
    requests = [
        ScheduledRequest(
            request_id="",
            row=row,
            num_computed_tokens=before,
            token_ids=(0,) * num,
            new_block_ids=(),
            needs_logits=True,
            num_drafts=num_drafts,
        )
        for row, (num, before) in enumerate(shares)
    ]
    return step_features(ScheduledBatch(step=0, requests=tuple(requests)), windows)


def in_window(batch: ScheduledBatch, window: int) -> tuple[int, int]:
    """Count (pairs of a token and one it sees, itself included; KV tokens read) within a window."""
    pairs = seen = 0
    for r in batch.requests:
        more = seen_in_window(len(r.token_ids), r.num_computed_tokens, window)
        pairs, seen = pairs + more[0], seen + more[1]
    return pairs, seen


def seen_in_window(num_tokens: int, num_before: int, window: int) -> tuple[int, int]:
    """Count the same of one request that computes `num_tokens` behind `num_before` others."""
    # The first tokens may see less than a window.
    num_short = min(num_tokens, max(0, window - num_before))
    pairs = num_short * num_before + num_short * (num_short + 1) // 2 + (num_tokens - num_short) * window
    return pairs, min(num_before, window - 1) + num_tokens


@dataclass(slots=True, kw_only=True)
class DecodeRun:
    """What decode steps are made of that follow one another while the same requests decode: a StepFeatures
    whose sums are sequences, of a number per step. No arrays: most runs are of a few steps."""

    num_requests: int
    num_seen: range
    windowed: tuple[tuple[Sequence[int], Sequence[int]], ...] = ()
    num_prefills: int = 0
    num_drafts: int = 0
    is_decode: bool = True

    @property
    def num_tokens(self) -> int:
        return self.num_requests

    @property
    def num_logits(self) -> int:
        return self.num_requests

    @property
    def num_pairs(self) -> range:
        return self.num_seen  # each request computes one token

    def step(self, index: int) -> StepFeatures:
        """Return the features of one of the steps."""
        return StepFeatures(
            num_requests=self.num_requests,
            num_tokens=self.num_requests,
            num_logits=self.num_requests,
            num_prefills=0,
            num_pairs=self.num_seen[index],
            num_seen=self.num_seen[index],
            windowed=tuple((pairs[index], seen[index]) for pairs, seen in self.windowed),
        )


def decode_run(befores: Sequence[int], num_steps: int, windows: Sequence[int] = ()) -> DecodeRun:
    """Sum up decode steps. `befores`: of each request, at least one, the tokens whose KV exists before the
    first step."""
    num = len(befores)
    first = sum(befores) + num
    within = [_seen_each(befores, num_steps, window) for window in windows]
    return DecodeRun(
        num_requests=num,
        num_seen=range(first, first + num * num_steps, num),
        windowed=tuple((seen, seen) for seen in within),
    )


def _seen_each(befores: Sequence[int], num_steps: int, window: int) -> list[int]:
    """Sum up, for each step, the tokens that requests see within a window: one more of each that has not
    filled it."""
    left = sorted(max(0, window - before) for before in befores)  # steps until each has
    seen, num_full, found = sum(min(before, window) for before in befores), 0, []
    for step in range(1, num_steps + 1):
        while num_full < len(left) and left[num_full] < step:
            num_full += 1
        seen += len(left) - num_full
        found.append(seen)
    return found


def windows_of(config: DecoderConfig) -> tuple[int, ...]:
    """List the windows of a model's layers, smallest first; a chunk counts as one."""
    return tuple(sorted({w for layer in config.layers if (w := layer.window or layer.chunk) is not None}))
