"""Pointwise steps in torch: the definition, and what runs on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, wide: bool
) -> torch.Tensor:
    floats = x.float()
    normed = floats * torch.rsqrt(floats.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if wide:
        return (normed * weight).to(x.dtype)
    return normed.to(x.dtype) * weight


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def gated_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply silu, gelu_tanh (gelu with the tanh approximation) or relu2 (relu squared)."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    assert activation == "gelu_tanh", activation
    return F.gelu(x, approximate="tanh")
