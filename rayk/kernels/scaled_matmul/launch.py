"""Chooses tiles of products in e4m3, and starts them on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from rayk.kernels.interpreter import INTERPRETED, launching, widened
from rayk.kernels.quantise import Quantised
from rayk.kernels.scaled_matmul.triton import add_splits_kernel, scaled_matmul_kernel
from rayk.kernels.scaled_matmul.weight import ScaledWeight
from rayk.kernels.target import Target, current_target

MOST_SPLITS = 8
LEAST_TILES_OF_SPLIT = 4
"""Fewer tiles of columns would not fill the buffers that a program reads ahead into."""
WHOLE = 2**30
"""Stands for the rows or columns of a block that spans all of them."""
ADDED_ELEMENTS = 512
"""Elements of a row that a program adds up over splits."""


class ScaledTiles(NamedTuple):
    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    band: int
    """Tiles of rows whose programs follow each other."""


@dataclass(frozen=True)
class Operands:
    """Quantised inputs and a weight as kernels take them."""

    x: torch.Tensor
    values: torch.Tensor
    x_scales: torch.Tensor
    w_scales: torch.Tensor
    x_scale_strides: tuple[int, int]
    constants: dict[str, Any]


def operands(inputs: Quantised, weight: ScaledWeight) -> Operands:
    """Return what launches of several kernels share; the constants say which scales there are."""
    x, x_scales = inputs
    assert x_scales is not None
    x, values, emulated = x.contiguous(), weight.values.contiguous(), not current_target().multiplies_e4m3
    if emulated:
        x, values = x.view(torch.uint8), values.view(torch.uint8)
    # They tell the form of a kernel, and must not depend on the number of tokens.
    num_groups = x_scales.shape[1]
    strides = (0 if weight.inputs == "static" else num_groups, 1 if num_groups > 1 else 0)
    return Operands(
        x,
        values,
        x_scales.contiguous(),
        weight.scales.contiguous(),
        strides,
        {
            "BLOCK_N": WHOLE if weight.scales.shape[-2] == 1 else weight.block[0],
            "BLOCK_K": weight.block[1] if weight.has_column_blocks else WHOLE,
            "EMULATED": emulated,
        },
    )


def choose_tiles(num_rows: float, weight: ScaledWeight, target: Target) -> ScaledTiles:
    """Choose by the rows that meet one matrix. A tile of columns lies within a block."""
    inner = min(128, weight.block[1]) if weight.has_column_blocks else 128
    if target.is_amd:
        return ScaledTiles(16 if num_rows <= 16 else 32, 64, min(64, inner), 4, 1, 8)
    if not target.multiplies_e4m3:
        return ScaledTiles(16 if num_rows <= 16 else 32, 64, min(64, inner), 4, 3, 8)
    if num_rows <= 32:
        # Weights are read once, by many programs that each read several tiles ahead.
        return ScaledTiles(16 if num_rows <= 16 else 32, 64, inner, 4, 5, 1)
    if num_rows <= 64:
        return ScaledTiles(64, 64, inner, 4, 4, 1)
    if target.name == "sm_90":
        return ScaledTiles(128, 128, inner, 8, 4, 8)
    # Elsewhere sums of so many columns, before and after they are scaled, take more registers than there are.
    return ScaledTiles(128, 64, inner, 8, 4 if target.has_room else 3, 8)


def choose_splits(num_tiles: int, num_in: int, t: ScaledTiles, target: Target) -> int:
    """Split the columns where programs are fewer than multiprocessors, most of which would read nothing."""
    most = min(MOST_SPLITS, -(-num_in // t.inner) // LEAST_TILES_OF_SPLIT)
    return max(1, min(most, target.num_multiprocessors // num_tiles))


def scaled_matmul_triton(
    inputs: Quantised,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    tiles: ScaledTiles | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    num_rows, (num_out, num_in), target = len(inputs.data), weight.values.shape, current_target()
    kept = torch.float32 if INTERPRETED else dtype
    out = torch.empty(num_rows, num_out, dtype=kept, device=inputs.data.device)
    if not num_rows:
        return out.to(dtype)
    t = tiles or choose_tiles(num_rows, weight, target)
    num_tiles = triton.cdiv(num_rows, t.rows) * triton.cdiv(num_out, t.columns)
    splits = splits or choose_splits(num_tiles, num_in, t, target)
    sums = out if splits == 1 else out.new_empty(splits, num_rows, num_out, dtype=torch.float32)
    has_bias, bias = bias is not None, None if bias is None else widened(bias).contiguous()
    o = operands(inputs, weight)
    with launching():
        scaled_matmul_kernel[(num_tiles, splits)](
            o.x,
            o.values,
            o.x_scales,
            o.w_scales,
            bias,
            sums,
            num_rows,
            num_in,
            num_out,
            o.x.stride(0),
            *o.x_scale_strides,
            o.w_scales.stride(0),
            triton.cdiv(triton.cdiv(num_in, t.inner), splits) * t.inner,
            HAS_BIAS=has_bias and splits == 1,
            IS_SPLIT=splits > 1,
            BAND=t.band,
            TILE_M=t.rows,
            TILE_N=t.columns,
            TILE_K=t.inner,
            num_warps=t.num_warps,
            num_stages=t.num_stages,
            **o.constants,
        )
        if splits > 1:
            add_splits_kernel[(triton.cdiv(num_out, ADDED_ELEMENTS), num_rows)](
                sums, bias, out, num_rows, num_out, splits, HAS_BIAS=has_bias, TILE=ADDED_ELEMENTS
            )
    return out.to(dtype)
