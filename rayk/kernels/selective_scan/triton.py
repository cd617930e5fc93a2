"""Mamba1 scan kernels for a GPU: a walk through a request, and one through its chunks at once.

The walk is one program per (request, tile of channels). The state stays in registers; a token's inputs are
loaded while the one before it is computed. A step of one token each is a walk of one. In a long prompt, what
a chunk of tokens makes of a state h is exp(a sum(dt)) h plus what it makes of zero:

     chunk, FROM_ZERO  all chunks at once: what they make of zero
     states            chunk after chunk: the state before each
     chunk             all chunks at once: outputs, from the states before them
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.chunks import segment_tokens, segments_of
from rayk.kernels.elements import softplus


@triton.jit
def _load_token(x, dt, b, c, z, i_t, o_c, o_n, m_c, m_n, strides, HAS_Z: tl.constexpr):
    """A token's x, dt, b, c, z in float32; without z, x stands in its place."""
    b_x = tl.load(x + i_t * strides[0] + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_dt = tl.load(dt + i_t * strides[1] + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_b = tl.load(b + i_t * strides[2] + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_c = tl.load(c + i_t * strides[3] + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_z = b_x
    if HAS_Z:
        b_z = tl.load(z + i_t * strides[4] + o_c, mask=m_c, other=0.0).to(tl.float32)
    return b_x, b_dt, b_b, b_c, b_z


@triton.jit
def selective_scan_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    z,
    out,
    state,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    x_stride_t,
    dt_stride_t,
    b_stride_t,
    c_stride_t,
    z_stride_t,
    stride_b,
    stride_u,
    num_channels,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_N: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_Z: tl.constexpr,
    TAKES: tl.constexpr,
):
    """Go token by token, requests that TAKES says. CHANNELS channels per unit. Grid: (requests, channel
    tiles)."""
    i_r = tl.program_id(0)
    first, last = segments_of(query_start_loc, segment_start_loc, i_r, TAKES)
    if first == last:
        return
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    o_n = tl.arange(0, PADDED_N)
    m_c = o_c < num_channels
    m_n = o_n < STATE
    m_state = m_c[:, None] & m_n[None, :]
    b_a = tl.load(a + o_c[:, None] * STATE + o_n[None, :], mask=m_state, other=0.0)
    b_d = tl.load(d + o_c, mask=m_c, other=0.0)
    b_bias = tl.load(dt_bias + o_c, mask=m_c, other=0.0)

    p_unit = state + ((o_c // CHANNELS).to(tl.int64) * stride_u + (o_c % CHANNELS) * STATE)[:, None]
    p_unit += o_n[None, :]
    slot = tl.load(read_slots + i_r)
    b_h = tl.load(p_unit + slot * stride_b, mask=m_state & (slot >= 0), other=0.0)

    i_t = tl.load(query_start_loc + i_r).to(tl.int64)
    stop = tl.load(query_start_loc + i_r + 1)
    i_s = first
    end = tl.load(segment_ends + i_s)
    strides = (x_stride_t, dt_stride_t, b_stride_t, c_stride_t, z_stride_t)
    b_x, b_dt, b_b, b_c, b_z = _load_token(x, dt, b, c, z, i_t, o_c, o_n, m_c, m_n, strides, HAS_Z)
    while i_t < stop:
        # The last turn loads its own token again.
        i_next = tl.minimum(i_t + 1, stop - 1)
        n_x, n_dt, n_b, n_c, n_z = _load_token(x, dt, b, c, z, i_next, o_c, o_n, m_c, m_n, strides, HAS_Z)
        b_dt = softplus(b_dt + b_bias)
        b_h = tl.exp(b_dt[:, None] * b_a) * b_h + (b_dt * b_x)[:, None] * b_b[None, :]
        b_y = tl.sum(b_h * b_c[None, :], 1) + b_d * b_x
        if HAS_Z:
            b_y *= b_z / (1.0 + tl.exp(-b_z))
        tl.store(out + i_t * num_channels + o_c, b_y.to(out.dtype.element_ty), mask=m_c)
        i_t += 1
        if i_t == end:
            slot = tl.load(write_slots + i_s)
            if slot >= 0:
                tl.store(p_unit + slot * stride_b, b_h, mask=m_state)
            if i_t < stop:
                i_s += 1
                end = tl.load(segment_ends + i_s)
        b_x, b_dt, b_b, b_c, b_z = n_x, n_dt, n_b, n_c, n_z


@triton.jit
def selective_scan_chunk_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    z,
    out,
    bounds,
    chunk_states,
    times,
    x_stride_t,
    dt_stride_t,
    b_stride_t,
    c_stride_t,
    z_stride_t,
    num_channels,
    STATE: tl.constexpr,
    PADDED_N: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_Z: tl.constexpr,
    FROM_ZERO: tl.constexpr,
):
    """Compute a chunk's outputs from the state before it, in chunk_states [M, N, C]. FROM_ZERO: start from
    zero, and leave the state after the chunk there instead, and the sum of dt in times [M, C]. Grid: (chunks,
    channel tiles). Tiles are [N, C], so that a thread has all states of a channel."""
    i_c = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    o_n = tl.arange(0, PADDED_N)
    m_c = o_c < num_channels
    m_n = o_n < STATE
    m_state = m_n[:, None] & m_c[None, :]
    b_a = tl.load(a + o_c[None, :] * STATE + o_n[:, None], mask=m_state, other=0.0) * 1.4426950408889634
    b_d = tl.load(d + o_c, mask=m_c, other=0.0)
    b_bias = tl.load(dt_bias + o_c, mask=m_c, other=0.0)
    p_state = chunk_states + (i_c * STATE + o_n[:, None]) * num_channels + o_c[None, :]
    b_time = tl.zeros([TILE_C], tl.float32)
    b_h = tl.zeros([PADDED_N, TILE_C], tl.float32)
    if not FROM_ZERO:
        b_h = tl.load(p_state, mask=m_state, other=0.0)

    i_t = tl.load(bounds + 2 * i_c).to(tl.int64)
    stop = tl.load(bounds + 2 * i_c + 1)
    strides = (x_stride_t, dt_stride_t, b_stride_t, c_stride_t, z_stride_t)
    b_x, b_dt, b_b, b_c, b_z = _load_token(x, dt, b, c, z, i_t, o_c, o_n, m_c, m_n, strides, HAS_Z)
    while i_t < stop:
        # The last turn loads its own token again.
        i_next = tl.minimum(i_t + 1, stop - 1)
        n_x, n_dt, n_b, n_c, n_z = _load_token(x, dt, b, c, z, i_next, o_c, o_n, m_c, m_n, strides, HAS_Z)
        b_dt = softplus(b_dt + b_bias)
        b_h = tl.exp2(b_dt[None, :] * b_a) * b_h + (b_dt * b_x)[None, :] * b_b[:, None]
        if FROM_ZERO:
            b_time += b_dt
        else:
            b_y = tl.sum(b_h * b_c[:, None], 0) + b_d * b_x
            if HAS_Z:
                b_y *= b_z / (1.0 + tl.exp(-b_z))
            tl.store(out + i_t * num_channels + o_c, b_y.to(out.dtype.element_ty), mask=m_c)
        i_t += 1
        b_x, b_dt, b_b, b_c, b_z = n_x, n_dt, n_b, n_c, n_z
    if FROM_ZERO:
        tl.store(p_state, b_h, mask=m_state)
        tl.store(times + i_c * num_channels + o_c, b_time, mask=m_c)


@triton.jit
def selective_scan_states_kernel(
    a,
    chunk_states,
    times,
    state,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    first_chunks,
    stride_b,
    stride_u,
    num_channels,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_N: tl.constexpr,
    TILE_C: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Take the state from chunk to chunk: turn chunk_states from what chunks make of zero into the states
    before them. Grid: (channel tiles, requests)."""
    o_c = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    i_r = tl.program_id(1)
    o_n = tl.arange(0, PADDED_N)
    m_c = o_c < num_channels
    m_state = (o_n < STATE)[:, None] & m_c[None, :]
    b_a = tl.load(a + o_c[None, :] * STATE + o_n[:, None], mask=m_state, other=0.0) * 1.4426950408889634
    p_unit = state + ((o_c // CHANNELS).to(tl.int64) * stride_u + (o_c % CHANNELS) * STATE)[None, :]
    p_unit += o_n[:, None]
    slot = tl.load(read_slots + i_r)
    b_h = tl.load(p_unit + slot * stride_b, mask=m_state & (slot >= 0), other=0.0)
    o_tile = o_n[:, None] * num_channels + o_c[None, :]
    first, last = segments_of(query_start_loc, segment_start_loc, i_r, "runs")
    for i_s in range(first, last):
        start, end = segment_tokens(query_start_loc + i_r, segment_ends + i_s, i_s > first)
        first_chunk = tl.load(first_chunks + i_s)
        for i in tl.range(0, (end - start + CHUNK - 1) // CHUNK, num_stages=STAGES):
            i_c = (first_chunk + i).to(tl.int64)
            p_chunk = chunk_states + i_c * STATE * num_channels + o_tile
            b_made = tl.load(p_chunk, mask=m_state, other=0.0)
            b_time = tl.load(times + i_c * num_channels + o_c, mask=m_c, other=0.0)
            tl.store(p_chunk, b_h, mask=m_state)
            b_h = tl.exp2(b_time[None, :] * b_a) * b_h + b_made
        slot = tl.load(write_slots + i_s)
        tl.store(p_unit + slot * stride_b, b_h, mask=m_state & (slot >= 0))
