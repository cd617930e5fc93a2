"""Random numbers that are functions of their place: no state, no order, no device.

The number of (seed, index, token) is output `token` of a splitmix64 generator that starts at a key mixed from
the seed and the index of the output token. A request therefore draws the same numbers in any batch, after a
preemption, and on whichever engine it goes on.

All integer arithmetic is modulo 2^64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
generators" (OOPSLA 2014), with the constants of Vigna's splitmix64.c.
"""

from __future__ import annotations

import torch

from rayk.kernels.digest.reference import MASK64, mix64, mix64_tensor, signed

_GOLDEN = 0x9E3779B97F4A7C15
_START = 0x7261796B64726177
_BITS = 52  # per uniform: (2^52 - 1/2) / 2^52 is the largest float64 of this form that is below 1


def draw_key(seed: int, index: int, *stream: int) -> int:
    """Mix the splitmix64 state (int64) from which output token `index` of a request with this seed is
    drawn. `stream`: which other decision about this token; none for the draw itself."""
    return signed(_mixed(seed, index, *stream))


def random_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Compute int64 [R, C]: outputs `token_ids` ([C] or [R, C]) of the generators in states `keys` [R]."""
    return mix64_tensor(keys.unsqueeze(1) + (token_ids + 1) * signed(_GOLDEN))


def uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Draw float64 [R, C], in the open interval (0, 1)."""
    return to_unit(random_bits(keys, token_ids))


def to_unit(bits: torch.Tensor) -> torch.Tensor:
    """Turn the highest bits of int64 into float64 in the open interval (0, 1)."""
    # int64 shifts copies of the sign in; clear them.
    high = (bits >> (64 - _BITS)) & ((1 << _BITS) - 1)
    return (high.double() + 0.5) * 2.0**-_BITS


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Draw float64 [R, C], Gumbel(0, 1), between -3.6 and 36.8: argmax(log p + noise) has the distribution
    p."""
    return uniform(keys, token_ids).log_().neg_().log_().neg_()


def near_gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Draw float32 [R, C]: what `gumbel` draws, at most 1e-5 off."""
    bits = random_bits(keys, token_ids)
    # -log(u) of a u near 1 is that of 1 - u, which keeps its digits; bits of either end differ by the sign.
    is_upper = bits < 0
    bits.bitwise_xor_(bits >> 63)
    small = (bits >> (64 - _BITS)).float().add_(0.5).mul_(2.0**-_BITS)
    return torch.where(is_upper, small.neg().log1p(), small.log()).neg_().log_().neg_()


def derived_seed(*parts: int) -> int:
    """Derive a seed in [0, 2^63) from all of `parts`, for requests that were given none."""
    return _mixed(*parts) >> 1


def _mixed(*parts: int) -> int:
    key = _START
    for part in parts:
        key = mix64(((key + _GOLDEN) & MASK64) ^ (part & MASK64))
    return key
