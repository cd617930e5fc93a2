"""Products of e4m3 values on a GPU, scaled block by block.

Tensor cores add up tiles of at most 128 columns from zero; each tile's sum is multiplied by its scales and
added in float32, since the tensor cores' own sums of e4m3 have fewer bits (DeepSeek-V3's report, 3.3.2). A
GPU that does not multiply e4m3 is given the values as float16, which has all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.quantise.triton import decode_e4m3


@triton.jit
def sum_scaled(
    p_x,
    p_w,
    p_x_scale,
    p_w_scale,
    m_m,
    m_n,
    first,
    last,
    num_in,
    x_scale_stride,
    BLOCK_K: tl.constexpr,
    EMULATED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Add up columns `first` to `last` of x's rows at p_x [TILE_M, TILE_K] times the matrix's at p_w [TILE_K,
    TILE_N]; each tile's sum is multiplied by its scales, which change every BLOCK_K columns (at p_x_scale
    [TILE_M] and p_w_scale [TILE_N]). Returns [TILE_M, TILE_N]."""
    o_k = tl.arange(0, TILE_K)
    b_out = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    i_block = first // BLOCK_K
    b_x_scale = tl.load(p_x_scale + i_block * x_scale_stride, mask=m_m, other=0.0)
    b_w_scale = tl.load(p_w_scale + i_block, mask=m_n, other=0.0)
    for i_k in range(first, last, TILE_K):
        m_k = i_k + o_k < num_in
        b_x = tl.load(p_x + i_k, mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_w = tl.load(p_w + i_k, mask=m_k[:, None] & m_n[None, :], other=0.0)
        if EMULATED:
            b_x = decode_e4m3(b_x).to(tl.float16)
            b_w = decode_e4m3(b_w).to(tl.float16)
        # The multiplication keeps Triton from adding to b_out in tensor cores, whose sums have fewer bits.
        b_out += tl.dot(b_x, b_w) * b_x_scale[:, None] * b_w_scale[None, :]
        # The next tile's, so that nothing waits for them.
        i_next, has_next = (i_k + TILE_K) // BLOCK_K, i_k + TILE_K < last
        b_x_scale = tl.load(p_x_scale + i_next * x_scale_stride, mask=m_m & has_next, other=0.0)
        b_w_scale = tl.load(p_w_scale + i_next, mask=m_n & has_next, other=0.0)
    return b_out


@triton.jit(do_not_specialize=("num_rows",))
def scaled_matmul_kernel(
    x,
    values,
    x_scales,
    w_scales,
    biases,
    out,
    num_rows,
    num_in,
    num_out,
    x_stride,
    x_scale_stride_t,
    x_scale_stride_k,
    w_scale_stride,
    columns_of_split,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EMULATED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BAND: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write out [num_rows, num_out], or the float32 sums of each split [splits, num_rows, num_out]. Grid:
    (tiles, in bands of BAND tiles of rows, so that programs at work share what they read; splits)."""
    tiles_m, tiles_n = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_out, TILE_N)
    i_band = tl.program_id(0) // (BAND * tiles_n)
    rows_of_band = tl.minimum(tiles_m - i_band * BAND, BAND)
    i_in_band = tl.program_id(0) % (BAND * tiles_n)
    i_n = i_in_band // rows_of_band
    o_m = (i_band * BAND + i_in_band % rows_of_band) * TILE_M + tl.arange(0, TILE_M)
    o_n = i_n * TILE_N + tl.arange(0, TILE_N)
    m_m, m_n = o_m < num_rows, o_n < num_out
    o_k = tl.arange(0, TILE_K)
    first = tl.program_id(1) * columns_of_split
    b_out = sum_scaled(
        x + o_m.to(tl.int64)[:, None] * x_stride + o_k[None, :],
        values + o_n.to(tl.int64)[None, :] * num_in + o_k[:, None],
        x_scales + o_m * x_scale_stride_t,
        w_scales + (o_n // BLOCK_N) * w_scale_stride,
        m_m,
        m_n,
        first,
        tl.minimum(first + columns_of_split, num_in),
        num_in,
        x_scale_stride_k,
        BLOCK_K,
        EMULATED,
        TILE_M,
        TILE_N,
        TILE_K,
    )
    p_out = out + o_m.to(tl.int64)[:, None] * num_out + o_n[None, :]
    if IS_SPLIT:
        p_out += tl.program_id(1).to(tl.int64) * num_rows * num_out
    elif HAS_BIAS:
        b_out += tl.load(biases + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=("num_rows", "num_splits"))
def add_splits_kernel(
    sums,
    biases,
    out,
    num_rows,
    num_out,
    num_splits,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up sums [num_splits, num_rows, num_out] in order, and the bias. Grid: (tiles of a row, rows)."""
    o_n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_n = o_n < num_out
    i_m = tl.program_id(1).to(tl.int64)
    b_out = tl.zeros((TILE,), dtype=tl.float32)
    for i_split in range(num_splits):
        p_sum = sums + (i_split * num_rows + i_m) * num_out + o_n
        b_out += tl.load(p_sum, mask=m_n, other=0.0)
    if HAS_BIAS:
        b_out += tl.load(biases + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(out + i_m * num_out + o_n, b_out.to(out.dtype.element_ty), mask=m_n)
