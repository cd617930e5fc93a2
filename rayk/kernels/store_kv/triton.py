"""store_kv on a GPU: one program per (token, tile of heads) moves their keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.quantise.cache import QuantisedKV
from rayk.kernels.quantise.triton import quantise_tile

TILE_ELEMENTS = 2048
"""Keys or values per program: 16 bytes a thread and step with 4 warps and 16-bit elements."""


@triton.jit(do_not_specialize=("num_blocks",))
def store_kv_kernel(
    k,
    v,
    kv_cache,
    slot_mapping,
    num_blocks,
    num_heads,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    stride_b,
    stride_h,
    stride_n,
    NUM_SLOTS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    TILE_H: tl.constexpr,
):
    """Grid: (tokens, head tiles). A slot outside the cache, like -1, stores nothing."""
    i_t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + i_t)
    i_block = slot // NUM_SLOTS
    if (slot < 0) | (i_block >= num_blocks):
        return
    o_h = (tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)).to(tl.int64)
    m_h = (o_h < num_heads)[:, None]
    p_row = (kv_cache + i_block * stride_b + (slot % NUM_SLOTS) * stride_n + o_h * stride_h)[:, None]
    o_k = tl.arange(0, PADDED_K)[None, :]
    m_k = m_h & (o_k < HEAD_K)
    b_k = tl.load(k + i_t * k_stride_t + (o_h * k_stride_h)[:, None] + o_k, mask=m_k)
    tl.store(p_row + o_k, b_k.to(kv_cache.dtype.element_ty), mask=m_k)
    o_v = tl.arange(0, PADDED_V)[None, :]
    m_v = m_h & (o_v < HEAD_V)
    b_v = tl.load(v + i_t * v_stride_t + (o_h * v_stride_h)[:, None] + o_v, mask=m_v)
    tl.store(p_row + HEAD_K + o_v, b_v.to(kv_cache.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=("num_blocks",))
def store_quantised_kernel(
    values,
    data,
    scales,
    slot_mapping,
    num_blocks,
    num_heads,
    scale,
    stride_t,
    stride_h,
    data_stride_b,
    data_stride_h,
    data_stride_n,
    scales_stride_b,
    scales_stride_h,
    scales_stride_n,
    NUM_SLOTS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_H: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Store one side, k or v. Grid: (tokens, head tiles). A slot outside the cache, like -1, stores
    nothing."""
    i_t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + i_t)
    i_block = slot // NUM_SLOTS
    if (slot < 0) | (i_block >= num_blocks):
        return
    i_slot = slot % NUM_SLOTS
    o_h = (tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)).to(tl.int64)
    p_data = data + i_block * data_stride_b + i_slot * data_stride_n + o_h * data_stride_h
    p_scales = p_data
    if SCALES != "tensor":
        p_scales = scales + i_block * scales_stride_b + i_slot * scales_stride_n + o_h * scales_stride_h
    p_values = values + i_t * stride_t + o_h * stride_h
    quantise_tile(p_values, p_data, p_scales, o_h < num_heads, scale, HEAD, PADDED, SCALES)


def store_kv_triton(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor | QuantisedKV, slot_mapping: torch.Tensor
) -> None:
    """Take any strides, the last axis of each tensor dense."""
    if isinstance(kv_cache, QuantisedKV):
        _store_quantised(k, v, kv_cache, slot_mapping)
        return
    num_tokens, num_heads, head_size_k = k.shape
    head_size_v = v.shape[-1]
    assert kv_cache.shape[-1] == head_size_k + head_size_v, "content is keys then values"
    assert num_heads == v.shape[1] == kv_cache.shape[1], "one head slot per local KV head"
    assert k.stride(-1) == v.stride(-1) == kv_cache.stride(-1) == slot_mapping.stride(0) == 1
    if num_tokens == 0:
        return
    if INTERPRETED:
        # Narrowing is wrong there; copying is exact.
        k, v = k.to(kv_cache.dtype), v.to(kv_cache.dtype)
    padded_k, padded_v = triton.next_power_of_2(head_size_k), triton.next_power_of_2(head_size_v)
    tile_h = min(triton.next_power_of_2(num_heads), max(1, TILE_ELEMENTS // max(padded_k, padded_v)))
    with launching():
        store_kv_kernel[(num_tokens, triton.cdiv(num_heads, tile_h))](
            k,
            v,
            kv_cache,
            slot_mapping,
            kv_cache.shape[0],
            num_heads,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *kv_cache.stride()[:3],
            NUM_SLOTS=kv_cache.shape[2],
            HEAD_K=head_size_k,
            HEAD_V=head_size_v,
            PADDED_K=padded_k,
            PADDED_V=padded_v,
            TILE_H=tile_h,
            num_warps=4 if tile_h * padded_k >= 1024 else 1,
        )


def _store_quantised(
    k: torch.Tensor, v: torch.Tensor, cache: QuantisedKV, slot_mapping: torch.Tensor
) -> None:
    assert k.shape[1] == v.shape[1] == cache.shape[1], "one head slot per local KV head"
    assert k.stride(-1) == v.stride(-1) == slot_mapping.stride(0) == 1
    if len(k) == 0:
        return
    for values, side, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        num_tokens, num_heads, size = values.shape
        data, scales = cache.raw(side)
        assert data.shape[-1] == cache.kv_format.data_bytes(size), (values.shape, data.shape)
        padded = max(16, triton.next_power_of_2(size))
        tile_h = min(triton.next_power_of_2(num_heads), max(1, TILE_ELEMENTS // padded))
        if INTERPRETED:
            values = values.float()  # it has no bfloat16 arithmetic
        with launching():
            store_quantised_kernel[(num_tokens, triton.cdiv(num_heads, tile_h))](
                values,
                data,
                scales,
                slot_mapping,
                cache.shape[0],
                num_heads,
                float(scale),
                *values.stride()[:2],
                *data.stride()[:3],
                *((0, 0, 0) if scales is None else scales.stride()[:3]),
                NUM_SLOTS=cache.shape[2],
                HEAD=size,
                PADDED=padded,
                TILE_H=tile_h,
                SCALES=cache.kv_format.scales,
                num_warps=4 if tile_h * padded >= 1024 else 1,
            )
