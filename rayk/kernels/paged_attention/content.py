"""Reads tiles of keys and values from pages of any format, on a GPU.

`SCALES` is KVFormat.scales. Quantised pages are read as bytes and decoded (see quantise.triton) into float32;
elements times block scales, like e4m3, are exact in bf16 and fp16, so tensor cores lose nothing. The caller
applies the layer's scales to scores and weighted values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.quantise.triton import decode_e2m1, decode_e4m3


@triton.jit
def _codes(p_row, p_scales, o_d, o_byte, o_scale, m, SCALES: tl.constexpr):
    """float32 elements whose bytes are at p_row + o_byte, times their block scales at p_scales if there are
    any."""
    b_byte = tl.load(p_row + o_byte, mask=m, other=0)
    if SCALES == "block":
        b_value = decode_e2m1((b_byte.to(tl.int32) >> ((o_d % 2) * 4)) & 15)
        return b_value * decode_e4m3(tl.load(p_scales + o_scale, mask=m, other=0))
    return decode_e4m3(b_byte)


@triton.jit
def load_keys(
    p_row, o_k, DTYPE: tl.constexpr, HEAD_K: tl.constexpr, SCALES: tl.constexpr, WIDEN: tl.constexpr
):
    """Keys of the rows at p_row [KEYS], transposed: [PADDED_K, KEYS], zeros beyond HEAD_K. Rows are not
    masked: each pointer must be readable."""
    m_k = (o_k < HEAD_K)[:, None]
    if SCALES == "none":
        b_k = tl.load(p_row[None, :] + o_k[:, None], mask=m_k, other=0.0)
        return b_k.to(tl.float32) if WIDEN else b_k
    o_byte = o_k // 2 if SCALES == "block" else o_k
    p_scales = p_row[None, :] + HEAD_K // 2
    b_k = _codes(p_row[None, :], p_scales, o_k[:, None], o_byte[:, None], (o_k // 16)[:, None], m_k, SCALES)
    return b_k if WIDEN else b_k.to(DTYPE)


@triton.jit
def load_values(
    p_row,
    p_scale,
    m_v,
    m_block,
    o_v,
    DTYPE: tl.constexpr,
    HEAD_V: tl.constexpr,
    SCALES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Values of the rows at p_row [KEYS]: [KEYS, PADDED_V], zeros outside m_v. p_scale [KEYS]: per-(head,
    token) float32 scales, read where m_block [KEYS]."""
    if SCALES == "none":
        b_v = tl.load(p_row[:, None] + o_v[None, :], mask=m_v, other=0.0)
        return b_v.to(tl.float32) if WIDEN else b_v
    o_byte = o_v // 2 if SCALES == "block" else o_v
    p_scales = p_row[:, None] + HEAD_V // 2
    b_v = _codes(p_row[:, None], p_scales, o_v[None, :], o_byte[None, :], (o_v // 16)[None, :], m_v, SCALES)
    if SCALES == "token_head":
        # Not the weights: those times a scale might be too small for fp16.
        b_v = b_v * tl.load(p_scale, mask=m_block, other=0.0)[:, None]
    return b_v if WIDEN else b_v.to(DTYPE)
