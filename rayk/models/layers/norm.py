"""Normalisation. Statistics are float32 in every kind; what differs is when the result is rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rayk.models.config import NormConfig


class Norm:
    """What `config` says, over the last axis.

    `weight` is [D], or [heads, D] where each head of x [T, heads, D] has its own.
    """

    def __init__(self, weight: torch.Tensor, config: NormConfig) -> None:
        """`weight` as stored, in the model's dtype."""
        # In float32 the sum with the offset is what transformers adds anew in each forward.
        self.weight = weight.float() + config.offset if config.wide else weight
        self._eps = config.eps
        self._wide = config.wide
        self._centred = config.kind == "layer"
        assert config.kind in ("rms", "layer"), config
        assert config.wide or not config.offset, config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps shape and dtype."""
        wide = x.float()
        if self._centred:
            wide = wide - wide.mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        if self._wide:
            return (normed * self.weight).to(x.dtype)
        return normed.to(x.dtype) * self.weight
