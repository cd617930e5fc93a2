"""The gated delta rule on a GPU, token by token or by chunks of tokens.

Decode steps and float32 inputs go token by token: a program carries the state [Dk, TILE_V] of a (request,
value head, tile of value elements) in registers. Prefill of 16-bit inputs goes by chunks: with cumulative
decay G and the tokens' changes u of a state S,

     (I + A) u = beta (v - G k S),  A[i, j] = beta_i G_i / G_j (k_i . k_j) for j < i

(see torch_cpu). Three kernels, of which the first and the last take all chunks at once:

     solve   from_values = (I + A)^-1 beta v,  from_state = (I + A)^-1 beta G k
     states  chunk after chunk: u = from_values - from_state S, and S after it
     output  o = G q S + (q k^T with the decays between them) u

States before chunks and from_state are rounded to the inputs' dtype, what the inverse is made of to tf32;
other computed operands of products are taken in two parts. The grid of a decode step depends on no data, so
that a CUDA graph can capture it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.chunks import chunk_tokens, segment_tokens, segments_of
from rayk.kernels.ssd_scan.triton import in_parts


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def round_tf32(x, PRECISION: tl.constexpr):
    """Round float32 values to tf32: tensor cores truncate, which would make every product too small. Other
    precisions, NaN and infinity pass through."""
    if PRECISION == "tf32":
        bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
        x = tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def _squares(b_x):
    """Sum the squares of rows."""
    b_x = b_x.to(tl.float32)
    return tl.sum(b_x * b_x, 1)


@triton.jit
def _add_up(p_g, m_t):
    """Sum the logs of the decays from a chunk's first token on, in float64: what decays between two late
    tokens is a difference of long sums."""
    return tl.cumsum(tl.load(p_g, mask=m_t, other=0.0).to(tl.float64), 0)


@triton.jit
def _decay_between(b_total, m_past):
    """[i, j]: what is left at token i of what was there at token j; 0 outside m_past."""
    b_log = (b_total[:, None] - b_total[None, :]).to(tl.float32)
    # Masked before exp: later tokens would overflow it.
    return _exp(tl.where(m_past, b_log, float("-inf")))


@triton.jit
def _invert(b_a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Compute (I + b_a)^-1 of a strictly lower triangular [CHUNK, CHUNK].

    Its blocks on the diagonal, D, by elimination; with the blocks L below them, X = D - D L X, whose
    iteration makes one more row of blocks right each time.
    """
    BLOCK: tl.constexpr = 16
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    o_b = tl.arange(0, BLOCKS)
    o_i = tl.arange(0, BLOCK)
    m_diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_blocks = tl.reshape(b_a, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    b_own = tl.sum(tl.where(m_diagonal, b_blocks, 0.0), 2)
    b_inverse = tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)[None, :, :] + b_own * 0.0
    for j in range(BLOCK - 1):
        b_column = tl.sum(tl.where(o_i[None, None, :] == j, b_own, 0.0), 2)
        b_row = tl.sum(tl.where(o_i[None, :, None] == j, b_inverse, 0.0), 1)
        b_inverse -= b_column[:, :, None] * b_row[:, None, :]
    b_own = tl.reshape(tl.where(m_diagonal, b_inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])
    b_x = b_own
    if BLOCKS > 1:
        b_below = tl.reshape(tl.where(m_diagonal, 0.0, b_blocks), [CHUNK, CHUNK])
        b_own_tf32 = round_tf32(b_own, PRECISION)
        b_below = tl.dot(b_own_tf32, round_tf32(b_below, PRECISION), input_precision=PRECISION)
        b_below = round_tf32(-b_below, PRECISION)
        for _ in range(BLOCKS - 1):
            b_x = b_own + tl.dot(b_below, round_tf32(b_x, PRECISION), input_precision=PRECISION)
    return b_x


@triton.jit
def gated_delta_solve_kernel(
    k,
    v,
    g,
    beta,
    key_index,
    bounds,
    changes,
    from_state,
    key_scales,
    decays,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    g_stride_t,
    g_stride_h,
    beta_stride_t,
    beta_stride_h,
    num_heads,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TILE_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Solve a chunk's system for its values and for the state before it. Grid: (chunks, value heads).

    Fills changes [T, Hv, Dv] and from_state [T, Hv, Dk]; key_scales [T, Hv], what a raw key is multiplied by
    to have unit length, decayed to the chunk's end; and decays [M, Hv], of the state before it.
    """
    OPERAND: tl.constexpr = from_state.dtype.element_ty
    i_c = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    i_key = tl.load(key_index + i_h)
    o_c = tl.arange(0, CHUNK)
    o_t, m_t = chunk_tokens(bounds, i_c, CHUNK)
    b_beta = tl.load(beta + o_t * beta_stride_t + i_h * beta_stride_h, mask=m_t, other=0.0)
    b_total = _add_up(g + o_t * g_stride_t + i_h * g_stride_h, m_t)
    b_end = tl.sum(tl.where(o_c == CHUNK - 1, b_total, 0.0), 0)
    # Products of the inputs as they are, exact; lengths are divided out of the results.
    o_k = tl.arange(0, KEY_SIZE)
    p_k = k + (o_t * k_stride_t + i_key * k_stride_h)[:, None] + o_k[None, :]
    b_k = tl.load(p_k, mask=m_t[:, None], other=0.0).to(OPERAND)
    b_unit = tl.rsqrt(_squares(b_k) + 1e-6)
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
    b_a *= _decay_between(b_total, o_c[:, None] > o_c[None, :]) * (b_beta * b_unit)[:, None] * b_unit[None, :]
    b_x = _invert(b_a, CHUNK, PRECISION)

    b_kept = _exp(b_total.to(tl.float32))
    b_high, b_low = in_parts(b_x * (b_beta * b_kept * b_unit)[None, :], OPERAND)
    b_rows = tl.dot(b_low, b_k, input_precision="ieee")
    b_rows = tl.dot(b_high, b_k, b_rows, input_precision="ieee")
    o_row = o_t * num_heads + i_h
    p_from_state = from_state + (o_row * KEY_SIZE)[:, None] + o_k[None, :]
    tl.store(p_from_state, b_rows.to(OPERAND), mask=m_t[:, None])
    b_high, b_low = in_parts(b_x * b_beta[None, :], OPERAND)
    p_v = v + o_t * v_stride_t + i_h * v_stride_h
    for at in range(0, VALUE_SIZE, TILE_V):
        o_v = at + tl.arange(0, TILE_V)
        m_v = m_t[:, None] & (o_v < VALUE_SIZE)[None, :]
        b_v = tl.load(p_v[:, None] + o_v[None, :], mask=m_v, other=0.0).to(OPERAND)
        b_change = tl.dot(b_low, b_v, input_precision="ieee")
        b_change = tl.dot(b_high, b_v, b_change, input_precision="ieee")
        tl.store(changes + (o_row * VALUE_SIZE)[:, None] + o_v[None, :], b_change, mask=m_v)
    tl.store(key_scales + o_row, b_unit * _exp((b_end - b_total).to(tl.float32)), mask=m_t)
    tl.store(decays + i_c * num_heads + i_h, _exp(b_end.to(tl.float32)))


@triton.jit
def gated_delta_states_kernel(
    k,
    key_index,
    changes,
    from_state,
    key_scales,
    decays,
    befores,
    state,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    first_chunks,
    k_stride_t,
    k_stride_h,
    stride_b,
    stride_h,
    num_heads,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TILE_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Take the state from chunk to chunk. Grid: (value tiles, value heads, requests).

    Fills befores [M, Hv, Dk, Dv] with the states before chunks, and turns changes from those of the values
    alone into the tokens' changes.
    """
    OPERAND: tl.constexpr = from_state.dtype.element_ty
    i_h = tl.program_id(1).to(tl.int64)
    i_r = tl.program_id(2)
    i_key = tl.load(key_index + i_h)
    o_k = tl.arange(0, KEY_SIZE)
    o_v = tl.program_id(0) * TILE_V + tl.arange(0, TILE_V)
    o_c = tl.arange(0, CHUNK)
    m_v = (o_v < VALUE_SIZE)[None, :]
    o_tile = o_k[:, None] * VALUE_SIZE + o_v[None, :]
    p_state = state + i_h * stride_h + o_tile
    read_slot = tl.load(read_slots + i_r)
    b_state = tl.load(p_state + read_slot * stride_b, mask=m_v & (read_slot >= 0), other=0.0)
    first, last = segments_of(query_start_loc, segment_start_loc, i_r, "runs")
    for i_segment in range(first, last):
        start, end = segment_tokens(query_start_loc + i_r, segment_ends + i_segment, i_segment > first)
        first_chunk = tl.load(first_chunks + i_segment)
        for at in range(start, end, CHUNK):
            i_c = (first_chunk + (at - start) // CHUNK).to(tl.int64) * num_heads + i_h
            b_narrow = b_state.to(OPERAND)
            tl.store(befores + i_c * (KEY_SIZE * VALUE_SIZE) + o_tile, b_narrow, mask=m_v)
            o_t = (at + o_c).to(tl.int64)
            m_t = o_t < end
            o_row = o_t * num_heads + i_h
            p_from_state = from_state + (o_row * KEY_SIZE)[:, None] + o_k[None, :]
            b_from_state = tl.load(p_from_state, mask=m_t[:, None], other=0.0)
            p_k = k + o_t * k_stride_t + i_key * k_stride_h
            b_k = tl.load(p_k[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0).to(OPERAND)
            m_change = m_t[:, None] & m_v
            p_changes = changes + (o_row * VALUE_SIZE)[:, None] + o_v[None, :]
            b_change = tl.load(p_changes, mask=m_change, other=0.0)
            b_change -= tl.dot(b_from_state, b_narrow, input_precision="ieee")
            tl.store(p_changes, b_change, mask=m_change)
            b_change *= tl.load(key_scales + o_row, mask=m_t, other=0.0)[:, None]
            b_high, b_low = in_parts(b_change, OPERAND)
            b_state *= tl.load(decays + i_c)
            b_state = tl.dot(tl.trans(b_k), b_high, b_state, input_precision="ieee")
            b_state = tl.dot(tl.trans(b_k), b_low, b_state, input_precision="ieee")
        write_slot = tl.load(write_slots + i_segment)
        tl.store(p_state + write_slot * stride_b, b_state, mask=m_v & (write_slot >= 0))


@triton.jit
def gated_delta_output_kernel(
    q,
    k,
    g,
    key_index,
    bounds,
    changes,
    befores,
    out,
    scale,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    g_stride_t,
    g_stride_h,
    num_heads,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TILE_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Read the state before a chunk, and the changes in it. Grid: (chunks, value heads, value tiles)."""
    OPERAND: tl.constexpr = befores.dtype.element_ty
    i_c = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    i_key = tl.load(key_index + i_h)
    o_v = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    o_c = tl.arange(0, CHUNK)
    o_t, m_t = chunk_tokens(bounds, i_c, CHUNK)
    m_v = (o_v < VALUE_SIZE)[None, :]
    o_k = tl.arange(0, KEY_SIZE)
    p_q = q + (o_t * q_stride_t + i_key * q_stride_h)[:, None] + o_k[None, :]
    p_k = k + (o_t * k_stride_t + i_key * k_stride_h)[:, None] + o_k[None, :]
    p_before = befores + (i_c * num_heads + i_h) * (KEY_SIZE * VALUE_SIZE) + o_v[None, :]
    # A key whole: a loop over parts of it would be pipelined, and Triton gives a load that a product and a
    # sum both read one buffer too few: the next but one is written while tensor cores still read it.
    b_q = tl.load(p_q, mask=m_t[:, None], other=0.0).to(OPERAND)
    b_before = tl.load(p_before + o_k[:, None] * VALUE_SIZE, mask=m_v, other=0.0)
    b_k = tl.load(p_k, mask=m_t[:, None], other=0.0).to(OPERAND)
    b_out = tl.dot(b_q, b_before, input_precision="ieee")
    b_attention = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")

    # Products of the inputs as they are; lengths are divided out of the results.
    b_total = _add_up(g + o_t * g_stride_t + i_h * g_stride_h, m_t)
    b_out *= _exp(b_total.to(tl.float32))[:, None]
    b_attention *= tl.rsqrt(_squares(b_k) + 1e-6)[None, :]
    b_attention *= _decay_between(b_total, o_c[:, None] >= o_c[None, :])
    o_row = (o_t * num_heads + i_h) * VALUE_SIZE
    m_out = m_t[:, None] & m_v
    b_change = tl.load(changes + o_row[:, None] + o_v[None, :], mask=m_out, other=0.0)
    b_change, b_change_low = in_parts(b_change, OPERAND)
    b_attention, b_low = in_parts(b_attention, OPERAND)
    b_out = tl.dot(b_attention, b_change_low, b_out, input_precision="ieee")
    b_out = tl.dot(b_low, b_change, b_out, input_precision="ieee")
    b_out = tl.dot(b_attention, b_change, b_out, input_precision="ieee")
    b_out *= (scale * tl.rsqrt(_squares(b_q) + 1e-6))[:, None]
    tl.store(out + o_row[:, None] + o_v[None, :], b_out.to(out.dtype.element_ty), mask=m_out)


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
    TAKES: tl.constexpr,
):
    """Go token by token, requests that TAKES says. Grid: (requests, value heads, value tiles)."""
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
    first, last = segments_of(query_start_loc, segment_start_loc, i_r, TAKES)
    for i_segment in range(first, last):
        start, end = segment_tokens(query_start_loc + i_r, segment_ends + i_segment, i_segment > first)
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
