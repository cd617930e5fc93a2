"""From logits to tokens."""

from __future__ import annotations

import torch

from rayk.types.batch import ScheduledBatch


def sample_greedy(batch: ScheduledBatch, logits: torch.Tensor) -> dict[str, int]:
    """The most likely token per request that needs one; `logits` is [those requests, vocab]."""
    wanted = [r.request_id for r in batch.requests if r.needs_logits]
    assert logits.shape[0] == len(wanted), (logits.shape, len(wanted))
    return dict(zip(wanted, logits.argmax(dim=-1).tolist(), strict=True))
