"""Mamba2 scan kernels for a GPU: a walk token by token, and products over chunks of tokens.

Both are one program per (request, head, tile of its channels), the state in registers. `launch` starts them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.selective_scan.triton import softplus


@triton.jit
def round_tf32(x, PRECISION: tl.constexpr):
    """Round float32 values to tf32: tensor cores truncate, which would make every product too small. Other
    precisions, NaN and infinity pass through."""
    if PRECISION == "tf32":
        bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
        x = tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def dot_16_bit(a, b, PRECISION: tl.constexpr):
    """a @ b of float32 tiles, where b has 16-bit values, exact in tf32. The bits of a that tf32 drops are
    multiplied separately."""
    if PRECISION == "tf32":
        b_high = round_tf32(a, PRECISION)
        b_low = tl.dot(a - b_high, b, input_precision=PRECISION)
        return tl.dot(b_high, b, b_low, input_precision=PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


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
):
    """Go token by token. Grid: (requests, heads, channel tiles)."""
    i_r = tl.program_id(0)
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
    i_s = tl.load(segment_start_loc + i_r)
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
def ssd_chunk_kernel(
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
    WIDEN: tl.constexpr,
):
    """Go chunk by chunk. Grid: (requests, heads, channel tiles). Products of b and c use them as they are,
    products of computed float32 values use PRECISION."""
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

    x += i_h * x_stride_h
    dt += i_h
    b += i_g * b_stride_g
    c += i_g * c_stride_g
    out += i_h * HEAD
    start = tl.load(query_start_loc + i_r)
    for i_s in range(tl.load(segment_start_loc + i_r), tl.load(segment_start_loc + i_r + 1)):
        end = tl.load(segment_ends + i_s)
        for begin in range(start, end, CHUNK):
            m_t = begin + o_i < end
            o_t = (begin + o_i).to(tl.int64)
            # Where there is no token, dt = 0: nothing decays, nothing is added.
            b_dt = softplus(tl.load(dt + o_t * dt_stride_t, mask=m_t, other=0.0).to(tl.float32) + bias)
            b_dt = tl.where(m_t, b_dt, 0.0)
            b_log = b_dt * a_h
            # [i, j]: what decays after j, up to i. A sum of its own for each j, since a difference of sums
            # from the start would lose how little decays between two late tokens.
            b_after = tl.where(o_i[:, None] > o_i[None, :], b_log[:, None], 0.0)
            b_since = tl.cumsum(b_after, 0)
            b_until_end = tl.sum(b_after, 0)
            m_x = m_t[:, None] & m_p[None, :]
            p_x = x + o_t[:, None] * x_stride_t + o_p[None, :]
            b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
            m_b = m_t[:, None] & m_n[None, :]
            p_b = b + o_t[:, None] * b_stride_t + o_n[None, :]
            p_c = c + o_t[:, None] * c_stride_t + o_n[None, :]
            b_b = tl.load(p_b, mask=m_b, other=0.0)
            b_c = tl.load(p_c, mask=m_b, other=0.0)
            if WIDEN:
                b_b, b_c = b_b.to(tl.float32), b_c.to(tl.float32)

            b_decay = tl.where(o_i[:, None] >= o_i[None, :], tl.exp(b_since), 0.0)
            b_weight = tl.dot(b_c, tl.trans(b_b)) * b_decay * b_dt[None, :]
            # Of 16-bit inputs tf32 has every bit.
            b_before = tl.trans(round_tf32(b_h, PRECISION))
            b_y = tl.dot(b_c.to(tl.float32), b_before, input_precision=PRECISION)
            b_y = b_y * tl.exp(tl.cumsum(b_log, 0))[:, None] + d_h * b_x
            b_y += dot_16_bit(b_weight, b_x, PRECISION)
            p_out = out + o_t[:, None] * (HEADS * HEAD) + o_p[None, :]
            tl.store(p_out, b_y.to(out.dtype.element_ty), mask=m_x)
            b_left = b_x * (b_dt * tl.exp(b_until_end))[:, None]
            b_h = tl.exp(tl.sum(b_log, 0)) * b_h
            b_h += dot_16_bit(tl.trans(b_left), b_b.to(tl.float32), PRECISION)
        slot = tl.load(write_slots + i_s)
        if slot >= 0:
            tl.store(p_head + slot * stride_b, b_h, mask=m_state)
        start = end
