"""Say what a step is made of, in the numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayk.models.config import DecoderConfig
from rayk.types.batch import ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFeatures:
    """Sums over a step's requests, each of which computes n tokens after b whose KV exists."""

    num_requests: int
    num_tokens: int  # n
    num_logits: int  # tokens whose logits are computed
    num_prefills: int  # requests with n > 1 or b = 0
    num_pairs: int  # n * b + n * (n + 1) / 2: pairs of a token and one that it sees, itself included
    num_seen: int  # b + n: tokens whose KV is read
    windowed: tuple[tuple[int, int], ...] = ()  # per window of the model: (pairs, seen) within it

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token after others: such steps may be replayed."""
        return self.num_prefills == 0


def step_features(batch: ScheduledBatch, windows: Sequence[int] = ()) -> StepFeatures:
    """Sum up a step. `windows`: the model's (`windows_of`)."""
    num_tokens = num_logits = num_prefills = num_pairs = num_seen = 0
    for r in batch.requests:
        n, before = len(r.token_ids), r.num_computed_tokens
        num_tokens += n
        num_logits += r.num_logits + r.prompt_logits[1] - r.prompt_logits[0]
        num_prefills += n > 1 or not before
        num_pairs += n * before + n * (n + 1) // 2
        num_seen += before + n
    return StepFeatures(
        num_requests=len(batch.requests),
        num_tokens=num_tokens,
        num_logits=num_logits,
        num_prefills=num_prefills,
        num_pairs=num_pairs,
        num_seen=num_seen,
        windowed=tuple(in_window(batch, window) for window in windows),
    )


def step_of(shares: Sequence[tuple[int, int]], windows: Sequence[int] = ()) -> StepFeatures:
    """Sum up a step whose requests compute (n, after b others) and whose last tokens are all sampled."""
    requests = [
        ScheduledRequest(
            request_id="",
            row=row,
            num_computed_tokens=before,
            token_ids=(0,) * num,
            new_block_ids=(),
            needs_logits=True,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """What decode steps are made of that follow one another while the same requests decode: a StepFeatures
    whose sums are arrays, of a number per step [S]."""

    num_requests: int
    num_seen: NDArray[np.int64]  # [S]
    windowed: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...] = ()
    num_prefills: int = 0
    is_decode: bool = True

    @property
    def num_tokens(self) -> int:
        return self.num_requests

    @property
    def num_logits(self) -> int:
        return self.num_requests

    @property
    def num_pairs(self) -> NDArray[np.int64]:
        return self.num_seen  # each request computes one token

    def step(self, index: int) -> StepFeatures:
        """Return the features of one of the steps."""
        seen = int(self.num_seen[index])
        return StepFeatures(
            num_requests=self.num_requests,
            num_tokens=self.num_requests,
            num_logits=self.num_requests,
            num_prefills=0,
            num_pairs=seen,
            num_seen=seen,
            windowed=tuple((int(pairs[index]), int(seen[index])) for pairs, seen in self.windowed),
        )


def decode_run(befores: Sequence[int], num_steps: int, windows: Sequence[int] = ()) -> DecodeRun:
    """Sum up decode steps. `befores`: of each request, the tokens whose KV exists before the first one."""
    num = len(befores)
    seen = sum(befores) + num * np.arange(1, num_steps + 1)
    if not windows:
        return DecodeRun(num_requests=num, num_seen=seen)
    each = np.array(befores)[:, None] + np.arange(1, num_steps + 1)
    within = [np.minimum(each, window).sum(0) for window in windows]
    return DecodeRun(num_requests=num, num_seen=seen, windowed=tuple((w, w) for w in within))


def windows_of(config: DecoderConfig) -> tuple[int, ...]:
    """List the windows of a model's layers, smallest first; a chunk counts as one."""
    return tuple(sorted({w for layer in config.layers if (w := layer.window or layer.chunk) is not None}))
