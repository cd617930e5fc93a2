"""Grouped products on a GPU: a program computes one tile of one group's rows, and finds out which by itself.

The grid has as many tiles as any division of the rows into groups can need; those left over end at once. So
no launch depends on how many rows a group has, and a matrix without rows is not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rayk.kernels.interpreter import INTERPRETED, launching, widened
from rayk.kernels.scaled_matmul import ScaledWeight, quantise_inputs
from rayk.kernels.scaled_matmul.launch import choose_tiles as choose_scaled_tiles
from rayk.kernels.scaled_matmul.launch import operands
from rayk.kernels.scaled_matmul.triton import sum_scaled
from rayk.kernels.target import current_target


class GroupTiles(NamedTuple):
    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=("num_groups",))
def grouped_matmul_kernel(
    x,
    weights,
    biases,
    out,
    ends,
    num_groups,
    num_in,
    num_out,
    x_stride,
    weights_stride_e,
    weights_stride_i,
    weights_stride_o,
    x_scales,
    w_scales,
    x_scale_stride_n,
    x_scale_stride_k,
    w_scale_stride_e,
    w_scale_stride_o,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EMULATED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Grid: (tiles of rows, those of a group together; tiles of columns). With BLOCK_N, x and weights are
    e4m3 and have scales."""
    o_e = tl.arange(0, GROUPS)
    stops = tl.load(ends + o_e, mask=o_e < num_groups, other=0)
    starts = tl.load(ends + o_e - 1, mask=(o_e > 0) & (o_e < num_groups), other=0)
    num_tiles = (stops - starts + TILE_M - 1) // TILE_M
    last_tiles = tl.cumsum(num_tiles, 0)
    i_tile = tl.program_id(0)
    i_e = tl.sum((last_tiles <= i_tile).to(tl.int32), 0)
    if i_e >= num_groups:
        return
    is_own = o_e == i_e
    i_tile -= tl.sum(tl.where(is_own, last_tiles - num_tiles, 0), 0)
    stop = tl.sum(tl.where(is_own, stops, 0), 0)
    o_m = tl.sum(tl.where(is_own, starts, 0), 0) + i_tile * TILE_M + tl.arange(0, TILE_M)
    o_n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    m_m, m_n = (o_m < stop)[:, None], (o_n < num_out)[None, :]
    o_k = tl.arange(0, TILE_K)
    p_x = x + o_m.to(tl.int64)[:, None] * x_stride + o_k[None, :]
    p_w = weights + i_e.to(tl.int64) * weights_stride_e
    p_w += o_k[:, None] * weights_stride_i + o_n.to(tl.int64)[None, :] * weights_stride_o
    if BLOCK_N:
        b_out = sum_scaled(
            p_x,
            p_w,
            x_scales + o_m * x_scale_stride_n,
            w_scales + i_e * w_scale_stride_e + (o_n // BLOCK_N) * w_scale_stride_o,
            o_m < stop,
            o_n < num_out,
            0,
            num_in,
            num_in,
            x_scale_stride_k,
            BLOCK_K,
            EMULATED,
            TILE_M,
            TILE_N,
            TILE_K,
        )
    else:
        b_out = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for i_k in range(0, num_in, TILE_K):
            m_k = i_k + o_k < num_in
            b_x = tl.load(p_x + i_k, mask=m_m & m_k[None, :], other=0.0)
            b_w = tl.load(p_w + i_k * weights_stride_i, mask=m_k[:, None] & m_n, other=0.0)
            # Tensor cores would cut float32 operands off.
            b_out = tl.dot(b_x, b_w, b_out, input_precision="ieee")
    if HAS_BIAS:
        b_out += tl.load(biases + i_e * num_out + o_n, mask=o_n < num_out, other=0.0).to(tl.float32)[None, :]
    p_out = out + o_m.to(tl.int64)[:, None] * num_out + o_n[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m & m_n)


def choose_tiles(num_rows: int, num_groups: int, itemsize: int) -> GroupTiles:
    """Choose by the mean number of rows of a group, which shapes tell."""
    mean = num_rows / num_groups
    if itemsize > 2:
        return GroupTiles(16 if mean <= 16 else 32, 64, 32, 4, 2)
    if mean <= 32 or current_target().is_amd:
        return GroupTiles(16 if mean <= 16 else 32, 64, 64, 4, 2 if current_target().is_amd else 4)
    return GroupTiles(64, 128, 64, 4, 3) if mean <= 64 else GroupTiles(128, 128, 64, 8, 3)


def grouped_matmul_triton(
    x: torch.Tensor,
    weights: torch.Tensor | ScaledWeight,
    ends: torch.Tensor,
    biases: torch.Tensor | None,
    *,
    tiles: GroupTiles | None = None,
) -> torch.Tensor:
    num_rows, num_groups, dtype = len(x), len(ends), x.dtype
    assert x.stride(1) == 1, "dense rows"
    biases = None if biases is None else widened(biases).contiguous()
    if isinstance(weights, ScaledWeight):
        num_out, o = weights.num_outputs, operands(quantise_inputs(x, weights, impl="triton"), weights)
        t = tiles or _scaled_tiles(num_rows, num_groups, weights)
        x, matrices, constants = o.x, o.values.mT, o.constants
        scales = (o.x_scales, o.w_scales, *o.x_scale_strides, *o.w_scales.stride()[:2])
    else:
        num_out, x, matrices = weights.shape[2], widened(x), widened(weights)
        t = tiles or choose_tiles(num_rows, num_groups, x.element_size())
        scales, constants = (None, None, 0, 0, 0, 0), {"BLOCK_N": 0, "BLOCK_K": 0, "EMULATED": False}
    out = torch.empty(num_rows, num_out, dtype=torch.float32 if INTERPRETED else dtype, device=x.device)
    if num_rows and num_groups:
        # A group's last tile may be partly filled.
        num_tiles = triton.cdiv(num_rows, t.rows) + min(num_groups, num_rows)
        with launching():
            grouped_matmul_kernel[(num_tiles, triton.cdiv(num_out, t.columns))](
                x,
                matrices,
                biases,
                out,
                ends,
                num_groups,
                matrices.shape[1],
                num_out,
                x.stride(0),
                *matrices.stride(),
                *scales,
                GROUPS=triton.next_power_of_2(num_groups),
                HAS_BIAS=biases is not None,
                TILE_M=t.rows,
                TILE_N=t.columns,
                TILE_K=t.inner,
                num_warps=t.num_warps,
                num_stages=t.num_stages,
                **constants,
            )
    return out.to(dtype)


def _scaled_tiles(num_rows: int, num_groups: int, weights: ScaledWeight) -> GroupTiles:
    return GroupTiles(*choose_scaled_tiles(num_rows / num_groups, weights, current_target())[:5])
