"""Mamba2 scan kernels for a GPU: a walk token by token, and products over chunks of tokens.

The walk is one program per (request, head, tile of its channels), the state in registers. Chunks take three
kernels, of which the first and the last take all chunks at once (see torch_cpu for the sums):

     decay   what is left of each token's step at its chunk's end
     states  chunk after chunk, the state before each
     output  what tokens read of the state before their chunk, and of the tokens before them in it

States before chunks are rounded to the inputs' dtype; other computed operands of products are taken in two
parts of it. `launch` starts them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.chunks import chunk_tokens, segment_tokens, segments_of
from rayk.kernels.elements import softplus


@triton.jit
def _load_token(x, dt, b, c, i_t, o_p, o_n, m_p, m_n, strides):
    """Load a token's x, dt, b, c as float32."""
    b_x = tl.load(x + i_t * strides[0] + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_dt = tl.load(dt + i_t * strides[1]).to(tl.float32)
    b_b = tl.load(b + i_t * strides[2] + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_c = tl.load(c + i_t * strides[3] + o_n, mask=m_n, other=0.0).to(tl.float32)
    return b_x, b_dt, b_b, b_c


@triton.jit
def ssd_walk_kernel(
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
    TAKES: tl.constexpr,
):
    """Go token by token, requests that TAKES says. Grid: (requests, heads, channel tiles)."""
    i_r = tl.program_id(0)
    first, last = segments_of(query_start_loc, segment_start_loc, i_r, TAKES)
    if first == last:
        return
    i_h = tl.program_id(1).to(tl.int64)
    o_p = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    o_n = tl.arange(0, PADDED_N)
    m_p = o_p < HEAD
    m_n = o_n < STATE
    m_state = m_p[:, None] & m_n[None, :]
    i_g = tl.load(group_index + i_h)
    a_h = tl.load(a + i_h)
    d_h = tl.load(d + i_h)
    bias = tl.load(dt_bias + i_h)
    p_head = state + i_h * stride_h + o_p[:, None] * STATE + o_n[None, :]
    slot = tl.load(read_slots + i_r)
    b_h = tl.load(p_head + slot * stride_b, mask=m_state & (slot >= 0), other=0.0)

    x += i_h * x_stride_h
    dt += i_h
    b += i_g * b_stride_g
    c += i_g * c_stride_g
    strides = (x_stride_t, dt_stride_t, b_stride_t, c_stride_t)
    i_t = tl.load(query_start_loc + i_r).to(tl.int64)
    stop = tl.load(query_start_loc + i_r + 1)
    i_s = first
    end = tl.load(segment_ends + i_s)
    b_x, b_dt, b_b, b_c = _load_token(x, dt, b, c, i_t, o_p, o_n, m_p, m_n, strides)
    while i_t < stop:
        # The next token is on its way while this one is computed; the last turn loads its own again.
        i_next = tl.minimum(i_t + 1, stop - 1)
        n_x, n_dt, n_b, n_c = _load_token(x, dt, b, c, i_next, o_p, o_n, m_p, m_n, strides)
        b_dt = softplus(b_dt + bias)
        b_h = tl.exp(b_dt * a_h) * b_h + (b_dt * b_x)[:, None] * b_b[None, :]
        b_y = tl.sum(b_h * b_c[None, :], 1) + d_h * b_x
        tl.store(out + (i_t * HEADS + i_h) * HEAD + o_p, b_y.to(out.dtype.element_ty), mask=m_p)
        i_t += 1
        if i_t == end:
            slot = tl.load(write_slots + i_s)
            if slot >= 0:
                tl.store(p_head + slot * stride_b, b_h, mask=m_state)
            if i_t < stop:
                i_s += 1
                end = tl.load(segment_ends + i_s)
        b_x, b_dt, b_b, b_c = n_x, n_dt, n_b, n_c


@triton.jit
def in_parts(x, OPERAND: tl.constexpr):
    """Round x, float32, to a product's operand, and what that dropped to another: a product with both is as
    good as float32."""
    high = x.to(OPERAND)
    return high, (x - high.to(tl.float32)).to(OPERAND)


@triton.jit
def ssd_decay_kernel(
    dt,
    a,
    dt_bias,
    bounds,
    weights,
    decays,
    dt_stride_t,
    HEADS: tl.constexpr,
    TILE_H: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fill weights [T, H], dt decayed to the chunk's end, and decays [M, H], of the state before it. Grid:
    (chunks, head tiles)."""
    i_c = tl.program_id(0)
    o_h = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    o_t, m_t = chunk_tokens(bounds, i_c, CHUNK)
    m_h = o_h < HEADS
    m_dt = m_t[:, None] & m_h[None, :]
    bias = tl.load(dt_bias + o_h, mask=m_h, other=0.0)
    b_dt = tl.load(dt + o_t[:, None] * dt_stride_t + o_h[None, :], mask=m_dt, other=0.0)
    b_dt = tl.where(m_dt, softplus(b_dt.to(tl.float32) + bias[None, :]), 0.0)
    b_log = (b_dt * tl.load(a + o_h, mask=m_h, other=0.0)[None, :]).to(tl.float64)
    # In float64: what decays after a token is a difference of long sums.
    b_end = tl.sum(b_log, 0)
    b_after = b_end[None, :] - tl.cumsum(b_log, 0)
    p_weights = weights + o_t[:, None] * HEADS + o_h[None, :]
    tl.store(p_weights, b_dt * tl.exp(b_after.to(tl.float32)), mask=m_dt)
    tl.store(decays + i_c.to(tl.int64) * HEADS + o_h, tl.exp(b_end.to(tl.float32)), mask=m_h)


@triton.jit
def ssd_states_kernel(
    x,
    b,
    group_index,
    weights,
    decays,
    befores,
    state,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    first_chunks,
    x_stride_t,
    x_stride_h,
    b_stride_t,
    b_stride_g,
    stride_b,
    stride_h,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Take the state from chunk to chunk. Grid: (tiles of its channels times tiles of their states, heads,
    requests). Fills befores [M, H, P, N] with the states before chunks."""
    OPERAND: tl.constexpr = befores.dtype.element_ty
    TILES_N: tl.constexpr = (STATE + TILE_N - 1) // TILE_N
    i_h = tl.program_id(1).to(tl.int64)
    i_r = tl.program_id(2)
    i_g = tl.load(group_index + i_h)
    o_p = tl.program_id(0) // TILES_N * TILE_P + tl.arange(0, TILE_P)
    o_n = tl.program_id(0) % TILES_N * TILE_N + tl.arange(0, TILE_N)
    o_i = tl.arange(0, CHUNK)
    m_p = (o_p < HEAD)[None, :]
    m_n = (o_n < STATE)[None, :]
    m_state = (o_p < HEAD)[:, None] & m_n
    o_tile = o_p[:, None] * STATE + o_n[None, :]
    p_state = state + i_h * stride_h + o_tile
    slot = tl.load(read_slots + i_r)
    b_h = tl.load(p_state + slot * stride_b, mask=m_state & (slot >= 0), other=0.0)
    x += i_h * x_stride_h
    b += i_g * b_stride_g
    first, last = segments_of(query_start_loc, segment_start_loc, i_r, "runs")
    for i_s in range(first, last):
        start, end = segment_tokens(query_start_loc + i_r, segment_ends + i_s, i_s > first)
        first_chunk = tl.load(first_chunks + i_s)
        for begin in range(start, end, CHUNK):
            i_c = (first_chunk + (begin - start) // CHUNK).to(tl.int64) * HEADS + i_h
            tl.store(befores + i_c * (HEAD * STATE) + o_tile, b_h.to(OPERAND), mask=m_state)
            o_t = (begin + o_i).to(tl.int64)
            m_t = o_t < end
            p_x = x + o_t[:, None] * x_stride_t + o_p[None, :]
            p_b = b + o_t[:, None] * b_stride_t + o_n[None, :]
            b_x = tl.trans(tl.load(p_x, mask=m_t[:, None] & m_p, other=0.0).to(OPERAND))
            b_b = tl.load(p_b, mask=m_t[:, None] & m_n, other=0.0).to(tl.float32)
            b_b *= tl.load(weights + o_t * HEADS + i_h, mask=m_t, other=0.0)[:, None]
            b_high, b_low = in_parts(b_b, OPERAND)
            b_h *= tl.load(decays + i_c)
            b_h = tl.dot(b_x, b_high, b_h, input_precision="ieee")
            b_h = tl.dot(b_x, b_low, b_h, input_precision="ieee")
        slot = tl.load(write_slots + i_s)
        tl.store(p_state + slot * stride_b, b_h, mask=m_state & (slot >= 0))


@triton.jit
def ssd_output_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    group_index,
    bounds,
    befores,
    out,
    x_stride_t,
    x_stride_h,
    dt_stride_t,
    b_stride_t,
    b_stride_g,
    c_stride_t,
    c_stride_g,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    TILE_P: tl.constexpr,
    TILE_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute a chunk's outputs. Grid: (chunks, heads, channel tiles)."""
    OPERAND: tl.constexpr = befores.dtype.element_ty
    i_c = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    i_g = tl.load(group_index + i_h)
    o_i = tl.arange(0, CHUNK)
    o_p = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
    o_t, m_t = chunk_tokens(bounds, i_c, CHUNK)
    m_p = o_p < HEAD
    p_b = b + i_g * b_stride_g + o_t[:, None] * b_stride_t
    p_c = c + i_g * c_stride_g + o_t[:, None] * c_stride_t
    p_before = befores + ((i_c * HEADS + i_h) * HEAD + o_p[:, None]) * STATE
    b_y = tl.zeros([CHUNK, TILE_P], tl.float32)
    b_weight = tl.zeros([CHUNK, CHUNK], tl.float32)
    for at in range(0, STATE, TILE_N):
        o_n = (at + tl.arange(0, TILE_N))[None, :]
        m_n = o_n < STATE
        b_c = tl.load(p_c + o_n, mask=m_t[:, None] & m_n, other=0.0).to(OPERAND)
        b_before = tl.load(p_before + o_n, mask=m_p[:, None] & m_n, other=0.0)
        b_y = tl.dot(b_c, tl.trans(b_before), b_y, input_precision="ieee")
        b_b = tl.load(p_b + o_n, mask=m_t[:, None] & m_n, other=0.0).to(OPERAND)
        b_weight = tl.dot(b_c, tl.trans(b_b), b_weight, input_precision="ieee")

    b_dt = tl.load(dt + o_t * dt_stride_t + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_dt = tl.where(m_t, softplus(b_dt + tl.load(dt_bias + i_h)), 0.0)
    # In float64: a difference of float32 sums would lose how little decays between two late tokens.
    b_total = tl.cumsum((b_dt * tl.load(a + i_h)).to(tl.float64), 0)
    b_since = (b_total[:, None] - b_total[None, :]).to(tl.float32)
    b_weight *= tl.exp(tl.where(o_i[:, None] >= o_i[None, :], b_since, float("-inf"))) * b_dt[None, :]
    m_x = m_t[:, None] & m_p[None, :]
    p_x = x + i_h * x_stride_h + o_t[:, None] * x_stride_t + o_p[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(OPERAND)
    b_y = b_y * tl.exp(b_total.to(tl.float32))[:, None] + tl.load(d + i_h) * b_x.to(tl.float32)
    b_high, b_low = in_parts(b_weight, OPERAND)
    b_y = tl.dot(b_high, b_x, b_y, input_precision="ieee")
    b_y = tl.dot(b_low, b_x, b_y, input_precision="ieee")
    p_out = out + (o_t[:, None] * HEADS + i_h) * HEAD + o_p[None, :]
    tl.store(p_out, b_y.to(out.dtype.element_ty), mask=m_x)
