"""Tile sizes of the gated-delta-rule kernels, from facts that the host knows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rayk.kernels.interpreter import INTERPRETED
from rayk.kernels.target import Target


class DeltaTiles(NamedTuple):
    values: int
    """Value elements per program that carries a state, a power of two."""
    tokens: int
    """Tokens per chunk; 1 goes token by token."""
    num_warps: int = 4
    """Warps of a program that takes one chunk."""
    state_warps: int = 4
    """Warps of a program that carries a state through chunks."""
    precision: str = "ieee"
    """Input precision of float32 products."""
    output_values: int = 64
    """Value elements that a chunk's program takes at once."""
    stages: int = 1
    """Chunks of which a program that carries a state has loads under way."""
    solve_registers: int | None = None
    """The most registers of a thread that solves a chunk; None leaves that to the compiler."""
    operand: torch.dtype | None = None
    """Data type of computed operands; None takes the inputs', or float32 in the interpreter."""


CHUNKED_KEY_SIZES = (32, 64, 128)
"""Wider keys leave no registers for a product's operands; other sizes need masks, which take some."""


def choose_tiles(
    target: Target, *, key_size: int, padded_v: int, num_heads: int, by_token: bool
) -> DeltaTiles:
    """Choose tiles that fit the target's registers, and of which one request's value heads give each
    multiprocessor one. padded_v is a power of two from 16 on.

    `by_token` switches chunks off. `make kernels` shows the registers of each choice, and fails if one
    spills.
    """
    if by_token or key_size not in CHUNKED_KEY_SIZES:
        return DeltaTiles(min(padded_v, 32 if key_size <= 128 else 16), 1)
    values = min(padded_v, 32)
    # A state goes from chunk to chunk one after the other: only tiles of it can go to more multiprocessors.
    while values > 16 and num_heads * (padded_v // values) < target.num_multiprocessors:
        values //= 2
    if target.is_amd:
        return DeltaTiles(values, 64, 8)
    # The interpreter multiplies float32 as it is.
    precision = "ieee" if INTERPRETED else "tf32"
    # Others hold all operands in registers.
    state_warps = 4 if target.has_warp_group_mma else 8
    # Without a limit the compiler takes 130 there, two too many for a second program beside the first.
    solve_registers = 128 if target.name == "sm_100" else None
    return DeltaTiles(values, 64, 8, state_warps, precision, stages=3, solve_registers=solve_registers)
