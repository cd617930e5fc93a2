"""Chooses the best token of each row of logits, and finds rows that are not finite."""

from __future__ import annotations

import torch

from rayk.kernels.best_tokens.native import best_tokens_native, is_native
from rayk.kernels.best_tokens.reference import NO_TOKEN, are_finite, best_tokens_reference

__all__ = ["NO_TOKEN", "are_finite", "best_tokens"]


def best_tokens(logits: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Find the largest of each row of float32 logits [R, V], the first of equal ones: int64 [R]. NO_TOKEN
    where a row has NaN or infinities. It does not wait for the device.

    `impl`: reference or native; None takes native on a CPU, where it can.
    """
    assert logits.dtype == torch.float32, logits.dtype
    if impl is None:
        impl = "native" if is_native(logits) else "reference"
    if impl == "native":
        return best_tokens_native(logits)
    assert impl == "reference", f"unknown best_tokens implementation {impl!r}"
    return best_tokens_reference(logits)
