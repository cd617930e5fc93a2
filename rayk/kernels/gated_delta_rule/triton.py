"""The gated delta rule on a GPU: one program per (request, value head, tile of value elements).

A program carries the state [Dk, TILE_V] in registers through all tokens and segments of its request. Decode
steps and float32 inputs go token by token. Prefill of 16-bit inputs goes by chunks, whose products run on
tensor cores in tf32: with cumulative decay G and the tokens' changes u,

     (I + A) u = beta (v - G k S),  A[i, j] = beta_i G_i / G_j (k_i . k_j) for j < i

(see torch_cpu). Chunks are as short as the smallest tile: I + A is inverted by elimination, token by token.

No grid depends on device data, so a CUDA graph can capture everything.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rayk.kernels.gated_delta_rule.tiles import DeltaTiles, choose_tiles
from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.segments import Segments
from rayk.kernels.ssd_scan.triton import round_tf32
from rayk.kernels.target import current_target

MAX_KEY_SIZE = 256
"""The widest key that the tiles hold."""


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _tokens_of(p_request, p_end, is_later):
    """First token and end of a segment, loaded from query_start_loc (p_request) or, if the request has an
    earlier segment (is_later), from segment_ends (p_end).

    Both are loaded: Triton drops a value that a loop carries only for the bounds of an inner one.
    """
    return tl.load(tl.where(is_later, p_end - 1, p_request)), tl.load(p_end)


@triton.jit
def _load_rows(p_row, m_row, KEY_SIZE: tl.constexpr, PADDED_K: tl.constexpr, WIDEN: tl.constexpr):
    """Load the rows at pointers p_row [n], zeros where masked: [n, PADDED_K]; and 1 / their lengths."""
    o_k = tl.arange(0, PADDED_K)
    b_x = tl.load(p_row[:, None] + o_k[None, :], mask=m_row[:, None] & (o_k < KEY_SIZE)[None, :], other=0.0)
    b_wide = b_x.to(tl.float32)
    b_scale = tl.rsqrt(tl.sum(b_wide * b_wide, 1) + 1e-6)
    if WIDEN:
        b_x = b_wide
    return b_x, b_scale


@triton.jit
def _invert(b_a, CHUNK: tl.constexpr):
    """Compute (I + b_a)^-1 of a strictly lower triangular [CHUNK, CHUNK], by elimination."""
    o_c = tl.arange(0, CHUNK)
    b_inverse = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0)
    for j in range(CHUNK - 1):
        b_column = tl.sum(tl.where(o_c[None, :] == j, b_a, 0.0), 1)
        b_row = tl.sum(tl.where(o_c[:, None] == j, b_inverse, 0.0), 0)
        b_inverse -= b_column[:, None] * b_row[None, :]
    return b_inverse


@triton.jit
def gated_delta_chunks_kernel(
    q,
    k,
    v,
    g,
    beta,
    key_index,
    state,
    out,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    scale,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    g_stride_t,
    g_stride_h,
    beta_stride_t,
    beta_stride_h,
    stride_b,
    stride_h,
    num_heads,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
    TILE_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Go chunk by chunk. Grid: (requests, value heads, value tiles)."""
    EXACT: tl.constexpr = "tf32x3" if PRECISION == "tf32" else PRECISION
    i_r = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_key = tl.load(key_index + i_h)
    o_k = tl.arange(0, PADDED_K)
    o_v = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    o_c = tl.arange(0, CHUNK)
    m_v = (o_v < VALUE_SIZE)[None, :]
    m_state = (o_k < KEY_SIZE)[:, None] & m_v
    p_state = state + i_h * stride_h + o_k[:, None] * VALUE_SIZE + o_v[None, :]
    read_slot = tl.load(read_slots + i_r)
    b_state = tl.load(p_state + read_slot * stride_b, mask=m_state & (read_slot >= 0), other=0.0)
    first = tl.load(segment_start_loc + i_r)
    for i_segment in range(first, tl.load(segment_start_loc + i_r + 1)):
        start, end = _tokens_of(query_start_loc + i_r, segment_ends + i_segment, i_segment > first)
        for at in range(start, end, CHUNK):
            o_t = (at + o_c).to(tl.int64)
            m_t = o_t < end
            b_g = tl.load(g + o_t * g_stride_t + i_h * g_stride_h, mask=m_t, other=0.0)
            b_beta = tl.load(beta + o_t * beta_stride_t + i_h * beta_stride_h, mask=m_t, other=0.0)
            b_total = tl.cumsum(b_g, 0)
            # Masked before exp: later tokens would overflow it.
            m_past = o_c[:, None] >= o_c[None, :]
            b_between = _exp(tl.where(m_past, b_total[:, None] - b_total[None, :], float("-inf")))
            # Products of the inputs as they are, exact; lengths are divided out of the results.
            b_k, b_unit = _load_rows(
                k + o_t * k_stride_t + i_key * k_stride_h, m_t, KEY_SIZE, PADDED_K, WIDEN
            )
            b_a = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_between
            b_a *= (b_beta * b_unit)[:, None] * b_unit[None, :]
            b_x = _invert(tl.where(o_c[:, None] > o_c[None, :], b_a, 0.0), CHUNK)
            p_v = v + o_t * v_stride_t + i_h * v_stride_h
            b_v = tl.load(p_v[:, None] + o_v[None, :], mask=m_t[:, None] & m_v, other=0.0).to(tl.float32)
            b_kept = _exp(b_total)
            # Of 16-bit inputs tf32 has every bit.
            b_before = round_tf32(b_state, PRECISION)
            b_stored = tl.dot(b_k.to(tl.float32), b_before, input_precision=PRECISION)
            b_v = b_beta[:, None] * (b_v - (b_kept * b_unit)[:, None] * b_stored)
            b_change = tl.dot(b_x, b_v, input_precision=EXACT)

            b_q, b_q_unit = _load_rows(
                q + o_t * q_stride_t + i_key * q_stride_h, m_t, KEY_SIZE, PADDED_K, WIDEN
            )
            b_attention = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_between * b_unit[None, :]
            b_out = b_kept[:, None] * tl.dot(b_q.to(tl.float32), b_before, input_precision=PRECISION)
            b_out += tl.dot(b_attention, b_change, input_precision=EXACT)
            b_out *= (scale * b_q_unit)[:, None]
            p_out = out + (o_t * num_heads + i_h) * VALUE_SIZE
            tl.store(p_out[:, None] + o_v[None, :], b_out.to(out.dtype.element_ty), mask=m_t[:, None] & m_v)

            all_g = tl.sum(b_g, 0)
            b_change *= (b_unit * _exp(all_g - b_total))[:, None]
            b_state *= _exp(all_g)
            b_state += tl.dot(tl.trans(b_k.to(tl.float32)), b_change, input_precision=EXACT)
        write_slot = tl.load(write_slots + i_segment)
        tl.store(p_state + write_slot * stride_b, b_state, mask=m_state & (write_slot >= 0))


@triton.jit
def gated_delta_tokens_kernel(
    q,
    k,
    v,
    g,
    beta,
    key_index,
    state,
    out,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    scale,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    g_stride_t,
    g_stride_h,
    beta_stride_t,
    beta_stride_h,
    stride_b,
    stride_h,
    num_heads,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
    TILE_V: tl.constexpr,
):
    """Go token by token. Grid: (requests, value heads, value tiles)."""
    i_r = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_key = tl.load(key_index + i_h)
    o_k = tl.arange(0, PADDED_K)
    o_v = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    m_k = o_k < KEY_SIZE
    m_v = o_v < VALUE_SIZE
    m_state = m_k[:, None] & m_v[None, :]
    p_state = state + i_h * stride_h + o_k[:, None] * VALUE_SIZE + o_v[None, :]
    read_slot = tl.load(read_slots + i_r)
    b_state = tl.load(p_state + read_slot * stride_b, mask=m_state & (read_slot >= 0), other=0.0)
    first = tl.load(segment_start_loc + i_r)
    for i_segment in range(first, tl.load(segment_start_loc + i_r + 1)):
        start, end = _tokens_of(query_start_loc + i_r, segment_ends + i_segment, i_segment > first)
        for i_t in range(start.to(tl.int64), end.to(tl.int64)):
            b_k = tl.load(k + i_t * k_stride_t + i_key * k_stride_h + o_k, mask=m_k, other=0.0)
            b_k = b_k.to(tl.float32)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
            b_v = tl.load(v + i_t * v_stride_t + i_h * v_stride_h + o_v, mask=m_v, other=0.0)
            b_state *= _exp(tl.load(g + i_t * g_stride_t + i_h * g_stride_h))
            b_change = b_v.to(tl.float32) - tl.sum(b_state * b_k[:, None], 0)
            b_change *= tl.load(beta + i_t * beta_stride_t + i_h * beta_stride_h)
            b_state += b_k[:, None] * b_change[None, :]
            b_q = tl.load(q + i_t * q_stride_t + i_key * q_stride_h + o_k, mask=m_k, other=0.0)
            b_q = b_q.to(tl.float32)
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * scale
            b_out = tl.sum(b_state * b_q[:, None], 0)
            p_out = out + (i_t * num_heads + i_h) * VALUE_SIZE + o_v
            tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_v)
        write_slot = tl.load(write_slots + i_segment)
        tl.store(p_state + write_slot * stride_b, b_state, mask=m_state & (write_slot >= 0))


def gated_delta_rule_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    key_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
    tiles: DeltaTiles | None = None,
) -> torch.Tensor:
    """Use only the tensors and the maximum of `segments`. `tiles` is for tests."""
    num_tokens, num_heads, value_size = v.shape
    key_size = k.shape[-1]
    assert key_size <= MAX_KEY_SIZE, key_size
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    out_dtype = torch.float32 if INTERPRETED else v.dtype
    out = torch.empty(num_tokens, num_heads, value_size, dtype=out_dtype, device=v.device)
    padded_k = max(16, triton.next_power_of_2(key_size))
    padded_v = max(16, triton.next_power_of_2(value_size))
    by_token = segments.is_single_step or v.dtype == torch.float32
    tiles = tiles or choose_tiles(current_target(), key_size=key_size, padded_v=padded_v, by_token=by_token)
    arguments: dict[str, Any] = segments.kernel_arguments | {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "key_index": key_index,
        "state": state,
        "out": out,
        "scale": float(scale),
        "num_heads": num_heads,
        "stride_b": state.stride(0),
        "stride_h": state.stride(1),
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "PADDED_K": padded_k,
        "TILE_V": tiles.values,
        "num_warps": tiles.num_warps,
        "num_stages": 1,
    }
    for name in ("q", "k", "v", "g", "beta"):
        strides = arguments[name].stride()
        arguments |= {f"{name}_stride_t": strides[0], f"{name}_stride_h": strides[1]}
    grid = (len(segments.read_slots), num_heads, triton.cdiv(value_size, tiles.values))
    with launching():
        if tiles.tokens == 1:
            gated_delta_tokens_kernel[grid](**arguments)
        else:
            gated_delta_chunks_kernel[grid](
                **arguments,
                CHUNK=tiles.tokens,
                PRECISION=tiles.precision,
                # The interpreter has no bf16 arithmetic.
                WIDEN=INTERPRETED or q.dtype != k.dtype,
            )
    return out.to(v.dtype)
