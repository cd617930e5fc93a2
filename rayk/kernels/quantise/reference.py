"""Quantising and dequantising in plain torch, on any device: the definition.

Legend: D elements of a head; `...` any axes before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rayk.kv.formats import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK, SMALLEST_SCALE, KVFormat

E4M3 = torch.float8_e4m3fn
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values by the low three bits of a code; the fourth bit is the sign."""


class Quantised(NamedTuple):
    """The stored form of one side (k or v) of heads of D elements."""

    data: torch.Tensor
    """[..., D] in the format's dtype; nvfp4: [..., D / 2] uint8, two codes per byte, the first low."""
    scales: torch.Tensor | None
    """[..., 1] float32 if there is one per (head, token); nvfp4: [..., D / 16] e4m3; else None."""


def quantise_reference(values: torch.Tensor, kv_format: KVFormat, scale: float) -> Quantised:
    if not kv_format.is_quantised:
        return Quantised(values.to(getattr(torch, kv_format.storage)), None)
    values, scale = values.float(), _as_float32(scale)
    values = values.masked_fill(values.isinf(), torch.nan)
    if kv_format.scales == "block":
        return _quantise_blocks(values, scale)
    if kv_format.scales == "tensor":
        return Quantised(to_e4m3(values / scale), None)
    scales = (values.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(SMALLEST_SCALE)
    return Quantised(to_e4m3(values / scales), scales)


def dequantise_reference(
    stored: Quantised, kv_format: KVFormat, scale: float, dtype: torch.dtype | None
) -> torch.Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if not kv_format.is_quantised:
        return stored.data.to(dtype or wide)
    if kv_format.scales == "block":
        assert stored.scales is not None, "nvfp4 without its scales"
        elements = from_e2m1(stored.data, wide)
        blocks = _by(NVFP4_BLOCK, elements) * stored.scales.to(wide).unsqueeze(-1)
        values = blocks.flatten(-2)
    else:
        values = stored.data.to(wide)
        if stored.scales is not None:
            return (values * stored.scales.to(wide)).to(dtype or wide)
    return (values * _as_float32(scale)).to(dtype or wide)


def _by(size: int, values: torch.Tensor) -> torch.Tensor:
    """View [..., D] as [..., D / size, size]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _as_float32(scale: float) -> float:
    """Round the scale to what a kernel receives."""
    return float(np.float32(scale))


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round float32 values to the nearest e4m3, saturating."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def from_e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode packed codes [..., n] uint8 into values [..., 2 n]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor((*E2M1_VALUES, *(-x for x in E2M1_VALUES)), dtype=dtype, device=packed.device)
    return table[codes.int()]


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes of values [..., 2 n], ties to even, saturating: [..., n] uint8. NaN becomes
    finite."""
    size = values.abs()
    # Each step up is taken at the middle, or only behind it where the lower code is the even one.
    codes = sum(
        ((size > middle) if lower % 2 == 0 else (size >= middle)).to(torch.uint8)
        for lower, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    )
    assert isinstance(codes, torch.Tensor)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    pairs = _by(2, codes)
    return pairs[..., 0] | pairs[..., 1] << 4


def _quantise_blocks(values: torch.Tensor, scale: float) -> Quantised:
    blocks = _by(NVFP4_BLOCK, values)
    scales = to_e4m3(blocks.abs().amax(-1) / (E2M1_MAX * scale))
    divisors = scales.float() * scale
    # A block of (nearly) zeros has a scale of zero, and all its codes are.
    quotients = torch.where(divisors.unsqueeze(-1) == 0, 0.0, blocks / divisors.unsqueeze(-1))
    return Quantised(to_e2m1(quotients.flatten(-2)), scales)
