"""Rows of experts on a GPU: a program moves or adds up a tile of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayk.kernels.interpreter import launching, widened

TILE_ELEMENTS = 1024
"""Elements of a row per program: 16 bytes a thread of 16-bit ones."""


@triton.jit
def gather_rows_kernel(
    x,
    order,
    shares,
    rows,
    places,
    size,
    x_stride_t,
    COPIES: tl.constexpr,
    TILE_D: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """Grid: (copies, tiles of a row)."""
    i = tl.program_id(0).to(tl.int64)
    copy = tl.load(order + i)
    tl.store(places + copy, i)
    o_d = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    b = tl.load(x + copy // COPIES * x_stride_t + o_d, mask=o_d < size)
    if WEIGHS:
        b = b.to(tl.float32) * tl.load(shares + copy).to(tl.float32)
    tl.store(rows + i * size + o_d, b.to(rows.dtype.element_ty), mask=o_d < size)


@triton.jit
def combine_rows_kernel(
    rows,
    places,
    shares,
    out,
    num_rows,
    size,
    COPIES: tl.constexpr,
    TILE_D: tl.constexpr,
    WEIGHS: tl.constexpr,
    SOME_MISS: tl.constexpr,
):
    """Grid: (tokens, tiles of a row)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    b_sum = tl.zeros([TILE_D], tl.float32)
    for i_k in tl.static_range(COPIES):
        place = tl.load(places + i_t * COPIES + i_k)
        m = o_d < size
        if SOME_MISS:
            m = m & (place < tl.load(num_rows))
        b = tl.load(rows + place * size + o_d, mask=m, other=0.0).to(tl.float32)
        if WEIGHS:
            b *= tl.load(shares + i_t * COPIES + i_k).to(tl.float32)
        b_sum += b
    tl.store(out + i_t * size + o_d, b_sum.to(out.dtype.element_ty), mask=o_d < size)


def gather_rows_triton(
    x: torch.Tensor, order: torch.Tensor, num_copies: int, shares: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.stride(1) == 1, "dense rows"
    dtype = x.dtype
    x, shares = widened(x), widened(shares)
    rows = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
    places = torch.empty_like(order)
    if len(order):
        tile = min(triton.next_power_of_2(x.shape[1]), TILE_ELEMENTS)
        with launching():
            gather_rows_kernel[len(order), triton.cdiv(x.shape[1], tile)](
                x,
                order,
                None if shares is None else shares.contiguous(),
                rows,
                places,
                x.shape[1],
                x.stride(0),
                COPIES=num_copies,
                TILE_D=tile,
                WEIGHS=shares is not None,
                num_warps=4,
            )
    return rows.to(dtype), places


def combine_rows_triton(
    rows: torch.Tensor,
    places: torch.Tensor,
    shares: torch.Tensor | None,
    num_copies: int,
    num_rows: torch.Tensor | None,
) -> torch.Tensor:
    assert rows.is_contiguous(), "dense rows"
    dtype = rows.dtype
    rows, shares = widened(rows), widened(shares)
    num_tokens = len(places) // num_copies
    out = torch.empty(num_tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if num_tokens:
        tile = min(triton.next_power_of_2(rows.shape[1]), TILE_ELEMENTS)
        with launching():
            combine_rows_kernel[num_tokens, triton.cdiv(rows.shape[1], tile)](
                rows,
                places,
                None if shares is None else shares.contiguous(),
                out,
                num_rows,
                rows.shape[1],
                COPIES=num_copies,
                TILE_D=tile,
                WEIGHS=shares is not None,
                SOME_MISS=num_rows is not None,
                num_warps=4,
            )
    return out.to(dtype)
