"""Pointwise steps in torch: the definition."""

from __future__ import annotations

from dataclasses import dataclass

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


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor | None, *, eps: float) -> torch.Tensor:
    floats = x.float()
    centred = floats - floats.mean(-1, keepdim=True)
    return rms_norm_reference(centred, weight, eps=eps, wide=True).to(x.dtype)


def gated_norm_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    group_size: int,
    eps: float,
    order: str,
    wide: bool,
) -> torch.Tensor:
    gates = F.silu(gate.float())
    floats = x.float() if order == "norm_gate" else x.float() * gates
    if order != "plain":
        groups = floats.reshape(*floats.shape[:-1], -1, group_size)
        normed = rms_norm_reference(groups if wide else groups.to(x.dtype), None, eps=eps, wide=True)
        if weight is not None:
            normed = normed * weight.view(-1, group_size)
        floats = normed.float().flatten(-2)
    return (floats * gates if order == "norm_gate" else floats).to(x.dtype)


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def rotate_pairs_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, into_halves: bool
) -> torch.Tensor:
    size = 2 * cos.shape[-1]
    even, odd, rest = x[..., 0:size:2], x[..., 1:size:2], x[..., size:]
    if into_halves:
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin, rest], dim=-1)
    even, odd, cos, sin = even.float(), odd.float(), cos.float(), sin.float()
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    turned = turned.flatten(-2).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat([turned, rest], dim=-1)


@dataclass(frozen=True, slots=True)
class GateThreshold:
    """Where gates are cut: at a quantile of a normal distribution with their mean and deviation."""

    sums: torch.Tensor
    """[T, 2] float64: of a token's gates, those of all ranks, and of their squares. That preserves a
    deviation far below the mean."""
    num_gates: int
    quantile: float
    """In deviations."""

    def apply(self, gate: torch.Tensor) -> torch.Tensor:
        """Reduce gates [T, some] to their excess over the cut, at least 0."""
        mean, square = (self.sums / self.num_gates).unbind(-1)
        # If gates are nearly equal, rounding may give a negative variance.
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        quantile = float(torch.tensor(self.quantile).to(gate.dtype))
        return F.relu(gate - (mean.to(gate.dtype) + deviation.to(gate.dtype) * quantile)[:, None])


def gate_sums_reference(gate: torch.Tensor) -> torch.Tensor:
    wide = gate.double()
    return torch.stack([wide.sum(-1), wide.square().sum(-1)], dim=-1)


def gated_reference(gate_up: torch.Tensor, activation: str, cut: GateThreshold | None = None) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate if cut is None else cut.apply(gate), activation) * up


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply silu, gelu_tanh (gelu with the tanh approximation) or relu2 (relu squared)."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    assert activation == "gelu_tanh", activation
    return F.gelu(x, approximate="tanh")
