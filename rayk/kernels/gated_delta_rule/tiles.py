"""Tile sizes of the gated-delta-rule kernels, from facts that the host knows."""

from __future__ import annotations

from typing import NamedTuple

from rayk.kernels.interpreter import INTERPRETED
from rayk.kernels.target import Target


class DeltaTiles(NamedTuple):
    values: int
    """Value elements per program, a power of two."""
    tokens: int
    """Tokens per chunk; 1 goes token by token."""
    num_warps: int
    precision: str = "ieee"
    """Input precision of float32 products."""


CHUNKED_KEY_SIZES = (32, 64, 128)
"""Wider keys leave no registers for a product's operands; other sizes need masks, which take some."""


def choose_tiles(target: Target, *, key_size: int, padded_v: int, by_token: bool) -> DeltaTiles:
    """Choose tiles that fit the target's registers. padded_v is a power of two from 16 on.

    `by_token` switches chunks off. `make kernels` shows the registers of each choice, and fails if one
    spills.
    """
    if by_token or key_size not in CHUNKED_KEY_SIZES:
        return DeltaTiles(min(padded_v, 32 if key_size <= 128 else 16), 1, 4)
    if target.is_amd:
        return DeltaTiles(16, 16, 4)
    # The interpreter multiplies float32 as it is.
    precision = "ieee" if INTERPRETED else "tf32"
    return DeltaTiles(min(padded_v, 32) if target.has_warp_group_mma else 16, 16, 8, precision)
