"""Normalisation."""

from __future__ import annotations

import torch


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, statistics in float32, rounded before the weight.

    `weight` is [D], or [heads, D] where each head of x [T, heads, D] has its own.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last axis; keeps shape and dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight
