"""ssd_scan on a GPU.

Prefill (and mixed) batches: one program per (request, head, tile of its channels) walks through the
request's chunks of tokens as `torch_cpu` does, the state in registers. A step of one token each is a kernel
of its own, whose grid depends on no data, so that a CUDA graph can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.selective_scan.triton import softplus
from rayk.kernels.target import current_target

if TYPE_CHECKING:
    from rayk.kernels.segments import Segments

CHUNK_TOKENS = 32
TILE_ELEMENTS = 4096
"""States of a program, 32 a thread."""
MIN_TILE = 16
"""Smallest edge of a tile that tensor cores multiply."""


@triton.jit
def ssd_scan_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    group_index,
    out,
    state,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    x_stride_t,
    x_stride_h,
    dt_stride_t,
    b_stride_t,
    b_stride_g,
    c_stride_t,
    c_stride_g,
    stride_b,
    stride_h,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_N: tl.constexpr,
    TILE_P: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (requests, heads, channel tiles). Products of 16-bit inputs are exact as they are; others are
    made in float32 at PRECISION."""
    i_r = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_p = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    o_n = tl.arange(0, PADDED_N)
    o_i = tl.arange(0, CHUNK)
    m_p = o_p < HEAD
    m_n = o_n < STATE
    m_state = m_p[:, None] & m_n[None, :]
    i_g = tl.load(group_index + i_h)
    a_h = tl.load(a + i_h)
    d_h = tl.load(d + i_h)
    bias = tl.load(dt_bias + i_h)
    p_head = state + i_h * stride_h + o_p[:, None] * STATE + o_n[None, :]
    slot = tl.load(read_slots + i_r)
    b_h = tl.load(p_head + slot * stride_b, mask=m_state & (slot >= 0), other=0.0)  # [P, N]

    start = tl.load(query_start_loc + i_r)
    for i_s in range(tl.load(segment_start_loc + i_r), tl.load(segment_start_loc + i_r + 1)):
        end = tl.load(segment_ends + i_s)
        for begin in range(start, end, CHUNK):
            m_t = begin + o_i < end
            o_t = (begin + o_i).to(tl.int64)
            # Where there is no token, dt = 0: nothing decays, nothing is added.
            b_dt = softplus(tl.load(dt + o_t * dt_stride_t + i_h, mask=m_t, other=0.0).to(tl.float32) + bias)
            b_dt = tl.where(m_t, b_dt, 0.0)
            b_total = tl.cumsum(b_dt * a_h, 0)
            last = tl.sum(b_dt * a_h, 0)
            m_x = m_t[:, None] & m_p[None, :]
            p_x = x + i_h * x_stride_h + o_t[:, None] * x_stride_t + o_p[None, :]
            b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
            m_b = m_t[:, None] & m_n[None, :]
            p_b = b + i_g * b_stride_g + o_t[:, None] * b_stride_t + o_n[None, :]
            p_c = c + i_g * c_stride_g + o_t[:, None] * c_stride_t + o_n[None, :]
            b_b = tl.load(p_b, mask=m_b, other=0.0).to(tl.float32)
            b_c = tl.load(p_c, mask=m_b, other=0.0).to(tl.float32)

            b_since = tl.where(
                o_i[:, None] >= o_i[None, :], b_total[:, None] - b_total[None, :], float("-inf")
            )
            b_weight = tl.dot(b_c, tl.trans(b_b), input_precision=PRECISION) * tl.exp(b_since) * b_dt[None, :]
            b_y = tl.dot(b_c, tl.trans(b_h), input_precision=PRECISION) * tl.exp(b_total)[:, None]
            b_y += tl.dot(b_weight, b_x, input_precision=PRECISION) + d_h * b_x
            p_out = out + (o_t * HEADS + i_h)[:, None] * HEAD + o_p[None, :]
            tl.store(p_out, b_y.to(out.dtype.element_ty), mask=m_x)
            b_left = b_x * (b_dt * tl.exp(last - b_total))[:, None]
            b_h = tl.exp(last) * b_h + tl.dot(tl.trans(b_left), b_b, input_precision=PRECISION)
        slot = tl.load(write_slots + i_s)
        if slot >= 0:
            tl.store(p_head + slot * stride_b, b_h, mask=m_state)
        start = end


@triton.jit
def ssd_step_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    group_index,
    out,
    state,
    read_slots,
    write_slots,
    x_stride_t,
    x_stride_h,
    dt_stride_t,
    b_stride_t,
    b_stride_g,
    c_stride_t,
    c_stride_g,
    stride_b,
    stride_h,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_N: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """One token a request. Grid: (requests, heads, channel tiles)."""
    i_r = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    o_p = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    o_n = tl.arange(0, PADDED_N)
    m_p = o_p < HEAD
    m_n = o_n < STATE
    m_state = m_p[:, None] & m_n[None, :]
    p_head = state + i_h * stride_h + o_p[:, None] * STATE + o_n[None, :]
    slot = tl.load(read_slots + i_r)
    b_h = tl.load(p_head + slot * stride_b, mask=m_state & (slot >= 0), other=0.0)
    i_g = tl.load(group_index + i_h)
    b_dt = softplus(tl.load(dt + i_r * dt_stride_t + i_h).to(tl.float32) + tl.load(dt_bias + i_h))
    b_x = tl.load(x + i_r * x_stride_t + i_h * x_stride_h + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_b = tl.load(b + i_r * b_stride_t + i_g * b_stride_g + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_c = tl.load(c + i_r * c_stride_t + i_g * c_stride_g + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_h = tl.exp(b_dt * tl.load(a + i_h)) * b_h + (b_dt * b_x)[:, None] * b_b[None, :]
    b_y = tl.sum(b_h * b_c[None, :], 1) + tl.load(d + i_h) * b_x
    tl.store(out + (i_r * HEADS + i_h) * HEAD + o_p, b_y.to(out.dtype.element_ty), mask=m_p)
    slot = tl.load(write_slots + i_r)
    if slot >= 0:
        tl.store(p_head + slot * stride_b, b_h, mask=m_state)


def ssd_scan_triton(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    group_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """Arguments and result as `ssd_scan`. `chunk_tokens` is for tests."""
    assert x.stride(2) == b.stride(2) == c.stride(2) == dt.stride(1) == 1, "last axes must be dense"
    assert state.dtype == a.dtype == d.dtype == dt_bias.dtype == torch.float32
    num_tokens, num_heads, head_size = x.shape
    out_dtype = torch.float32 if INTERPRETED else x.dtype
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if num_tokens == 0:
        return out.to(x.dtype)
    num_requests = len(segments.read_slots)
    padded_n = max(MIN_TILE, triton.next_power_of_2(b.shape[2]))
    tile_p = min(max(MIN_TILE, TILE_ELEMENTS // padded_n), max(MIN_TILE, triton.next_power_of_2(head_size)))
    arguments = {
        "group_index": group_index,
        "out": out,
        "state": state,
        "read_slots": segments.read_slots,
        "write_slots": segments.write_slots,
        "x_stride_t": x.stride(0),
        "x_stride_h": x.stride(1),
        "dt_stride_t": dt.stride(0),
        "b_stride_t": b.stride(0),
        "b_stride_g": b.stride(1),
        "c_stride_t": c.stride(0),
        "c_stride_g": c.stride(1),
        "stride_b": state.stride(0),
        "stride_h": state.stride(1),
        "HEADS": num_heads,
        "HEAD": head_size,
        "STATE": b.shape[2],
        "PADDED_N": padded_n,
        "TILE_P": tile_p,
    }
    grid = (num_requests, num_heads, triton.cdiv(head_size, tile_p))
    with launching():
        if segments.is_single_step:
            ssd_step_kernel[grid](x, dt, a, b, c, d, dt_bias, **arguments)
        else:
            ssd_scan_kernel[grid](
                x,
                dt,
                a,
                b,
                c,
                d,
                dt_bias,
                query_start_loc=segments.query_start_loc,
                segment_start_loc=segments.segment_start_loc,
                segment_ends=segments.segment_ends,
                CHUNK=chunk_tokens,
                PRECISION=_precision(x.dtype),
                **arguments,
            )
    return out.to(x.dtype)


def _precision(dtype: torch.dtype) -> str:
    """Of float32 products. tf32 keeps as many bits as 16-bit inputs have; three of them, nearly all."""
    if current_target().is_amd:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
