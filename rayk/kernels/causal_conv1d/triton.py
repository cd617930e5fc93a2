"""causal_conv1d on a GPU.

Prefill (and mixed) batches take two kernels: one program per (tile of a request's tokens, tile of channels)
computes outputs; then one per (request, tile of channels) writes the states at segment ends. The order
matters: a state may overwrite the one that the outputs were computed from. A step of one token each is one
kernel, whose grid depends on no data, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.segments import Segments

TILE_TOKENS = 32
TILE_CHANNELS = 128


@triton.jit
def _activate(b_y, SILU: tl.constexpr):
    if SILU:
        b_y = b_y / (1.0 + tl.exp(-b_y))
    return b_y


@triton.jit
def causal_conv1d_kernel(
    x,
    weight,
    bias,
    out,
    state,
    query_start_loc,
    read_slots,
    x_stride_t,
    weight_stride_c,
    stride_b,
    stride_u,
    num_channels,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Compute outputs. CHANNELS per unit. Grid: (most tiles of tokens of a request, requests, channel
    tiles)."""
    i_r = tl.program_id(1)
    start = tl.load(query_start_loc + i_r)
    num_tokens = tl.load(query_start_loc + i_r + 1) - start
    first = tl.program_id(0) * TILE_T
    if first >= num_tokens:
        return
    slot = tl.load(read_slots + i_r)
    o_t = first + tl.arange(0, TILE_T)
    o_c = tl.program_id(2) * TILE_C + tl.arange(0, TILE_C)
    m_c = o_c < num_channels
    m_row = (o_t < num_tokens)[:, None] & m_c[None, :]
    p_x = x + start.to(tl.int64) * x_stride_t + o_c[None, :]
    p_state = state + slot * stride_b + (o_c // CHANNELS).to(tl.int64) * stride_u
    p_state += (o_c % CHANNELS) * (WIDTH - 1)
    b_y = tl.zeros([TILE_T, TILE_C], tl.float32)
    if HAS_BIAS:
        b_y += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(WIDTH):
        o_in = o_t - (WIDTH - 1) + w
        m_x = m_row & (o_in >= 0)[:, None]
        b_x = tl.load(p_x + o_in.to(tl.int64)[:, None] * x_stride_t, mask=m_x, other=0.0).to(tl.float32)
        m_tap = m_row & ((o_in < 0) & (slot >= 0))[:, None]
        b_tap = tl.load(p_state[None, :] + (o_in + WIDTH - 1)[:, None], mask=m_tap, other=0.0)
        b_weight = tl.load(weight + o_c * weight_stride_c + w, mask=m_c, other=0.0).to(tl.float32)
        b_y += (b_x + b_tap.to(tl.float32)) * b_weight[None, :]
    p_out = out + (start + o_t).to(tl.int64)[:, None] * num_channels + o_c[None, :]
    tl.store(p_out, _activate(b_y, SILU).to(out.dtype.element_ty), mask=m_row)


@triton.jit
def keep_taps_kernel(
    x,
    state,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    x_stride_t,
    stride_b,
    stride_u,
    num_channels,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_TAPS: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Write the last inputs of every segment. Grid: (requests, channel tiles)."""
    i_r = tl.program_id(0)
    start = tl.load(query_start_loc + i_r)
    slot = tl.load(read_slots + i_r)
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    o_w = tl.arange(0, PADDED_TAPS)
    m_tap = (o_c < num_channels)[:, None] & (o_w < WIDTH - 1)[None, :]
    p_unit = state + ((o_c // CHANNELS).to(tl.int64) * stride_u + (o_c % CHANNELS) * (WIDTH - 1))[:, None]
    p_unit += o_w[None, :]
    b_old = tl.load(p_unit + slot * stride_b, mask=m_tap & (slot >= 0), other=0.0).to(tl.float32)
    # All old taps are read before any is written over, whichever thread does which.
    tl.debug_barrier()
    for i_s in range(tl.load(segment_start_loc + i_r), tl.load(segment_start_loc + i_r + 1)):
        slot = tl.load(write_slots + i_s)
        if slot >= 0:
            num_tokens = tl.load(segment_ends + i_s) - start
            # Tap w is input num_tokens - (WIDTH - 1) + w: before the first token, old tap num_tokens + w.
            m_old = (num_tokens + o_w)[None, :, None] == o_w[None, None, :]
            b_tap = tl.sum(tl.where(m_old, b_old[:, None, :], 0.0), 2)
            o_in = num_tokens - (WIDTH - 1) + o_w
            p_x = x + (start + o_in).to(tl.int64)[None, :] * x_stride_t + o_c[:, None]
            b_tap += tl.load(p_x, mask=m_tap & (o_in >= 0)[None, :], other=0.0).to(tl.float32)
            tl.store(p_unit + slot * stride_b, b_tap.to(state.dtype.element_ty), mask=m_tap)


@triton.jit
def causal_conv1d_step_kernel(
    x,
    weight,
    bias,
    out,
    state,
    read_slots,
    write_slots,
    x_stride_t,
    weight_stride_c,
    stride_b,
    stride_u,
    num_channels,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_TAPS: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Compute outputs and states of one token per request. Grid: (requests, channel tiles)."""
    i_r = tl.program_id(0).to(tl.int64)
    slot = tl.load(read_slots + i_r)
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    o_w = tl.arange(0, PADDED_TAPS)
    m_c = o_c < num_channels
    m_tap = m_c[:, None] & (o_w < WIDTH - 1)[None, :]
    p_unit = state + ((o_c // CHANNELS).to(tl.int64) * stride_u + (o_c % CHANNELS) * (WIDTH - 1))[:, None]
    p_unit += o_w[None, :]
    p_old = p_unit + slot * stride_b
    b_old = tl.load(p_old, mask=m_tap & (slot >= 0), other=0.0).to(tl.float32)
    m_later = m_tap & (o_w < WIDTH - 2)[None, :]
    b_new = tl.load(p_old + 1, mask=m_later & (slot >= 0), other=0.0).to(tl.float32)
    b_x = tl.load(x + i_r * x_stride_t + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_new += tl.where((o_w == WIDTH - 2)[None, :], b_x[:, None], 0.0)
    p_weight = weight + o_c * weight_stride_c
    b_weight = tl.load(p_weight[:, None] + o_w[None, :], mask=m_tap, other=0.0).to(tl.float32)
    b_y = tl.sum(b_old * b_weight, 1)
    b_y += b_x * tl.load(p_weight + WIDTH - 1, mask=m_c, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b_y += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(out + i_r * num_channels + o_c, _activate(b_y, SILU).to(out.dtype.element_ty), mask=m_c)
    # All old taps are read before any is written over, whichever thread does which.
    tl.debug_barrier()
    slot = tl.load(write_slots + i_r)
    if slot >= 0:
        tl.store(p_unit + slot * stride_b, b_new.to(state.dtype.element_ty), mask=m_tap)


def causal_conv1d_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    segments: Segments,
    *,
    activation: str | None,
) -> torch.Tensor:
    assert x.stride(1) == weight.stride(1) == 1, "channels of x and taps of the weight must be dense"
    num_tokens, num_channels = x.shape
    width = weight.shape[1]
    out_dtype = torch.float32 if INTERPRETED else x.dtype
    out = torch.empty(num_tokens, num_channels, dtype=out_dtype, device=x.device)
    num_requests = len(segments.read_slots)
    if num_tokens == 0:
        return out.to(x.dtype)
    tile_c = min(TILE_CHANNELS, triton.next_power_of_2(num_channels))
    num_tiles = triton.cdiv(num_channels, tile_c)
    padded_taps = triton.next_power_of_2(width - 1)
    place = {
        "x_stride_t": x.stride(0),
        "stride_b": state.stride(0),
        "stride_u": state.stride(1),
        "num_channels": num_channels,
        "CHANNELS": state.shape[2],
        "WIDTH": width,
        "TILE_C": tile_c,
    }
    outputs = {
        "weight": weight,
        "bias": bias,
        "out": out,
        "weight_stride_c": weight.stride(0),
        "HAS_BIAS": bias is not None,
        "SILU": activation == "silu",
    }
    slots = {"read_slots": segments.read_slots, "write_slots": segments.write_slots}
    with launching():
        if segments.is_single_step:
            grid = (num_requests, num_tiles)
            causal_conv1d_step_kernel[grid](
                x, state=state, PADDED_TAPS=padded_taps, **place, **outputs, **slots
            )
            return out.to(x.dtype)
        # Not fewer for short requests: that would be another kernel to compile.
        causal_conv1d_kernel[(triton.cdiv(segments.max_query_len, TILE_TOKENS), num_requests, num_tiles)](
            x,
            state=state,
            query_start_loc=segments.query_start_loc,
            read_slots=segments.read_slots,
            TILE_T=TILE_TOKENS,
            **place,
            **outputs,
        )
        keep_taps_kernel[(num_requests, num_tiles)](
            x,
            state=state,
            query_start_loc=segments.query_start_loc,
            segment_start_loc=segments.segment_start_loc,
            segment_ends=segments.segment_ends,
            PADDED_TAPS=padded_taps,
            **place,
            **slots,
        )
    return out.to(x.dtype)
