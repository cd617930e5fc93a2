"""store_kv on a GPU: one program per (token, tile of heads) moves their keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rayk.kernels.interpreter import INTERPRETED, launching

if TYPE_CHECKING:
    import torch

TILE_ELEMENTS = 2048
"""Keys or values that one program moves: 16 bytes a thread and step with 4 warps and 16-bit elements."""


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
    """Grid: (tokens, head tiles). A slot outside the cache, as -1 is, stores nothing."""
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


def store_kv_triton(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Arguments as `store_kv`. Any strides, the last axis of each tensor dense."""
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
