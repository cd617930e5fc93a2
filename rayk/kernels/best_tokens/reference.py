"""The best token of each row in torch: the definition."""

from __future__ import annotations

import torch

NO_TOKEN = -1
"""Stands for a row whose logits are not all finite."""


def best_tokens_reference(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(are_finite(logits), logits.argmax(dim=-1), NO_TOKEN)


def are_finite(logits: torch.Tensor) -> torch.Tensor:
    """Find rows of [R, V] without NaN and infinities, as bool [R], without waiting for the device."""
    # Both ends of a row are NaN where it has one. No sum: it may overflow.
    return logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
