"""store_kv on a GPU: one program per (token, head) moves its keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from rayk.kernels.interpreter import INTERPRETED, launching

if TYPE_CHECKING:
    import torch


@triton.jit
def store_kv_kernel(
    k,
    v,
    kv_cache,
    slot_mapping,
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
):
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + i_t)
    if slot < 0:
        return
    p_row = kv_cache + (slot // NUM_SLOTS) * stride_b + i_h * stride_h + (slot % NUM_SLOTS) * stride_n
    o_k = tl.arange(0, PADDED_K)
    b_k = tl.load(k + i_t * k_stride_t + i_h * k_stride_h + o_k, mask=o_k < HEAD_K)
    tl.store(p_row + o_k, b_k.to(kv_cache.dtype.element_ty), mask=o_k < HEAD_K)
    o_v = tl.arange(0, PADDED_V)
    b_v = tl.load(v + i_t * v_stride_t + i_h * v_stride_h + o_v, mask=o_v < HEAD_V)
    tl.store(p_row + HEAD_K + o_v, b_v.to(kv_cache.dtype.element_ty), mask=o_v < HEAD_V)


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
    with launching():
        store_kv_kernel[(num_tokens, num_heads)](
            k,
            v,
            kv_cache,
            slot_mapping,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *kv_cache.stride()[:3],
            NUM_SLOTS=kv_cache.shape[2],
            HEAD_K=head_size_k,
            HEAD_V=head_size_v,
            PADDED_K=triton.next_power_of_2(head_size_k),
            PADDED_V=triton.next_power_of_2(head_size_v),
            num_warps=1,
        )
