"""Say what a step is made of, in the numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rayk.models.config import DecoderConfig
from rayk.types.batch import ScheduledBatch


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
        num_logits += r.needs_logits + r.prompt_logits[1] - r.prompt_logits[0]
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


def in_window(batch: ScheduledBatch, window: int) -> tuple[int, int]:
    """Count (pairs of a token and one it sees, itself included; KV tokens read) within a window."""
    pairs = seen = 0
    for r in batch.requests:
        n, before = len(r.token_ids), r.num_computed_tokens
        # The first tokens may see less than a window.
        num_short = min(n, max(0, window - before))
        pairs += num_short * before + num_short * (num_short + 1) // 2 + (n - num_short) * window
        seen += min(before, window - 1) + n
    return pairs, seen


def grown(features: StepFeatures, num_steps: int) -> Iterator[StepFeatures]:
    """Yield a decode step and those that follow it while the same requests decode: each sees one token more.
    For steps in which every request sees whole windows already: what lies within them does not grow."""
    assert features.is_decode, features
    num = features.num_requests
    for step in range(num_steps):
        yield replace(
            features, num_pairs=features.num_pairs + step * num, num_seen=features.num_seen + step * num
        )


def windows_of(config: DecoderConfig) -> tuple[int, ...]:
    """List the windows of a model's layers, smallest first; a chunk counts as one."""
    return tuple(sorted({w for layer in config.layers if (w := layer.window or layer.chunk) is not None}))
