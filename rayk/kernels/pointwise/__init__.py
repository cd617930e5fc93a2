"""Pointwise steps between a layer's matrix products: norms, rotations, gated activations.

`impl` of each: reference (torch, any device) or native (C++, see native.is_native); None takes native where
it can. T tokens, H heads, D elements of a head or of a hidden state.
"""

from __future__ import annotations

import torch

from rayk.kernels.pointwise.native import (
    ACTIVATIONS,
    gated_native,
    is_native,
    rms_norm_native,
    rotate_native,
)
from rayk.kernels.pointwise.reference import activate, gated_reference, rms_norm_reference, rotate_reference

__all__ = ["activate", "gated", "rms_norm", "rotate_halves"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, wide: bool, impl: str | None = None
) -> torch.Tensor:
    """x / rms(x) over the last axis of [.., D], times `weight` [D] or, by head, [H, D]. Dense, in x's dtype.

    wide: the weight is float32, and the product is rounded; otherwise the weight has x's dtype, and x is
    rounded before the product (llama/modeling_llama.py, LlamaRMSNorm).
    """
    fits = weight is None or weight.dtype == (torch.float32 if wide else x.dtype)
    if _takes_native(impl, fits and is_native(x)):
        return rms_norm_native(x, weight, eps=eps, wide=wide)
    return rms_norm_reference(x, weight, eps=eps, wide=wide)


def rotate_halves(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, impl: str | None = None
) -> torch.Tensor:
    """Rotate dimensions i and i + half of x [T, H, D] by the angles of cos and sin [T, 1, half]; dimensions
    from 2 * half on pass through. Dense; each product is rounded to x's dtype, as in transformers."""
    if _takes_native(impl, is_native(x) and x.dim() == 3 and x.dtype == cos.dtype):
        return rotate_native(x, cos, sin)
    return rotate_reference(x, cos, sin)


def gated(gate_up: torch.Tensor, activation: str, *, impl: str | None = None) -> torch.Tensor:
    """Compute activation(gate) * up of gate_up [T, 2 * D], gates first: [T, D], as `activate` does."""
    if _takes_native(impl, activation in ACTIVATIONS and gate_up.dim() == 2 and is_native(gate_up)):
        return gated_native(gate_up, activation)
    return gated_reference(gate_up, activation)


def _takes_native(impl: str | None, can: bool) -> bool:
    assert impl in (None, "native", "reference"), f"unknown implementation {impl!r}"
    assert can or impl != "native", "the native kernel does not take this"
    return can and impl != "reference"
