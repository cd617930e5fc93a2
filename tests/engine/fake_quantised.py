"""transformers with a cache that rounds keys and values as a quantised format does, not by rayk's means.

The formats are written out anew in float64: every value of a format in a sorted table, the nearest taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

E4M3 = torch.tensor(
    sorted(
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e, m in itertools.product(range(16), range(8))
        if (e, m) != (15, 7)
    ),
    dtype=torch.float64,
)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def nearest(x: Tensor, table: Tensor) -> Tensor:
    """Each value's nearest, ties to the even entry."""
    size = x.abs().contiguous()
    upper = torch.searchsorted(table, size).clamp(1, len(table) - 1)
    low, high = table[upper - 1], table[upper]
    middle = (low + high) / 2
    takes_high = (size > middle) | ((size == middle) & (upper % 2 == 0))
    return torch.where(takes_high, high, low) * x.sign()


def rounded(x: Tensor, name: str, scale: float) -> Tensor:
    """x [..., D] after a round trip through the format."""
    wide = x.double()
    if name == "fp8_e4m3":
        found = nearest(wide / scale, E4M3) * scale
    elif name == "fp8_e4m3_token_head":
        own = (x.abs().amax(-1, keepdim=True) / 448.0).double().clamp_min(2.0**-126)
        found = nearest(wide / own, E4M3) * own
    else:
        blocks = wide.unflatten(-1, (-1, 16))
        own = nearest(blocks.abs().amax(-1, keepdim=True) / (6 * scale), E4M3) * scale
        found = (nearest(blocks / own.clamp_min(1e-30), E2M1) * own).flatten(-2)
    return found.to(x.dtype)


class RoundingCache(DynamicCache):  # type: ignore[misc]
    """Of one text, all of whose layers attend."""

    def __init__(self, name: str, scales: Callable[[int], tuple[float, float]]) -> None:
        super().__init__()
        self._name = name
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, T, D], of this pass rounded."""
        k, v = (
            rounded(x, self._name, s)
            for x, s in zip((key_states, value_states), self._scales(layer_idx), strict=True)
        )
        found: tuple[Tensor, Tensor] = super().update(k, v, layer_idx, *args, **kwargs)
        return found
