"""Paged attention kernels for a GPU: online softmax over tiles of keys. `launch` starts them.

A query tile has ROWS rows, each one (token, query head of the group).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.paged_attention.content import load_keys, load_values
from rayk.kernels.paged_attention.splits import keys_per_split

# Integers that change from step to step: specialising on them (1, multiples of 16) would compile again.
_VARYING = ("num_requests", "num_columns", "num_blocks", "num_splits", "table_stride")


@triton.jit
def _tanh(x):
    """Compute tanh, right to two ulp also near 0, unlike 1 - 2 / (exp(2 x) + 1) (Cephes' tanhf)."""
    x_squared = tl.minimum(x * x, 1.0)  # where the polynomial is not used, it must not overflow either
    small = -5.70498872745e-3 * x_squared + 2.06390887954e-2
    small = small * x_squared - 5.37397155531e-2
    small = small * x_squared + 1.33314422036e-1
    small = small * x_squared - 3.33332819422e-1
    small = small * x_squared * x + x
    # exp2 of a negative number: nothing overflows.
    shrunk = tl.exp2(tl.abs(x) * -2.8853900817779268)
    large = 1.0 - 2.0 * shrunk / (1.0 + shrunk)  # not (1 - e) / (1 + e), which rounds twice more
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def _request_of(query_start_loc, i_tile, num_requests, TILE_Q: tl.constexpr):
    """The last request whose tiles start at or before i_tile."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TILE_Q + middle <= i_tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load_queries(p_q, m_row, HEAD_K: tl.constexpr, PADDED_K: tl.constexpr, WIDEN: tl.constexpr):
    """Load the query rows at pointers p_q [ROWS], zeros where masked: [ROWS, PADDED_K]."""
    o_k = tl.arange(0, PADDED_K)
    b_q = tl.load(p_q[:, None] + o_k[None, :], mask=m_row[:, None] & (o_k < HEAD_K)[None, :], other=0.0)
    if WIDEN:
        b_q = b_q.to(tl.float32)
    return b_q


@triton.jit
def _attend(
    b_q,
    b_position,
    b_max,
    b_sum,
    b_acc,
    p_cache,
    p_values,
    p_scales,
    p_table,
    num_columns,
    num_blocks,
    stride_b,
    stride_n,
    values_stride_b,
    values_stride_n,
    first_key,
    end_key,
    scale,
    window,
    soft_cap,
    NUM_SLOTS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    EDGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SCALES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Continue attending query rows to keys first_key .. end_key - 1 of one sequence and KV head.

    Without EDGE these are whole tiles that every row sees; with EDGE and CAUSAL a row sees what its position
    allows. b_max and b_sum [ROWS], and b_acc [ROWS, PADDED_V], the weighted sum of values not yet divided,
    are the softmax so far; returns them updated.
    """
    o_k = tl.arange(0, b_q.shape[1])
    o_v = tl.arange(0, b_acc.shape[1])
    for start in range(first_key, end_key, TILE_KEYS):
        o_key = start + tl.arange(0, TILE_KEYS)
        m_key = o_key < end_key
        o_column = o_key // NUM_SLOTS
        b_block = tl.load(p_table + o_column, mask=m_key & (o_column < num_columns), other=-1)
        m_block = (b_block >= 0) & (b_block < num_blocks)
        # No mask on keys: what lies beyond the end is read in the null block, and never seen.
        b_block = tl.where(m_block, b_block, 0).to(tl.int64)
        o_slot = o_key % NUM_SLOTS
        p_row = p_cache + b_block * stride_b + o_slot * stride_n
        b_k = load_keys(p_row, o_k, b_q.dtype, HEAD_K, SCALES, WIDEN)
        p_value, p_scale = p_row + HEAD_K, p_row
        if SCALES == "block":
            p_value = p_values + b_block * values_stride_b + o_slot * values_stride_n
        if SCALES == "token_head":
            # Of a key, then of its value. Pages are whole float32s.
            p_scale = p_scales + b_block * (stride_b // 4) + o_slot * (stride_n // 4)
        m_v = (o_v < HEAD_V)[None, :]
        if EDGE:
            # A weight of zero does not undo a NaN.
            m_v = m_v & m_block[:, None]
        b_v = load_values(p_value, p_scale + 1, m_v, m_block, o_v, b_q.dtype, HEAD_V, SCALES, WIDEN)
        b_broken = tl.where(m_block, 0.0, float("nan"))
        b_scores = tl.dot(b_q, b_k, input_precision="ieee") * scale
        if SCALES == "token_head":
            b_scores *= tl.load(p_scale, mask=m_block, other=0.0)[None, :]
        b_scores += b_broken[None, :]
        if HAS_CAP:
            b_scores = soft_cap * _tanh(b_scores * (1.0 / soft_cap))
        if EDGE:
            m_seen = m_key[None, :]
            if CAUSAL:
                # As unsigned numbers, keys after the row are far away: one comparison for both borders.
                m_seen = (b_position[:, None] - o_key[None, :]).to(tl.uint32) < window
            b_scores = tl.where(m_seen, b_scores, float("-inf"))

        b_new_max = tl.maximum(b_max, tl.max(b_scores, 1))
        # A row may see nothing of this tile: keep -inf - -inf out of the exponent.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max) if EDGE else b_new_max
        # The maximum goes before the change of base, so that large scores lose nothing to it.
        b_p = tl.exp2((b_scores - b_base[:, None]) * 1.4426950408889634)
        b_shrink = tl.exp2((b_max - b_base) * 1.4426950408889634)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_acc = b_acc * b_shrink[:, None]
        b_acc += tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
        b_max = b_new_max
    return b_max, b_sum, b_acc


@triton.jit
def _start_softmax(sinks, b_head, m_row, PADDED_V: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Start the softmax before the first key (see _attend): empty, or each head's sink with weight one."""
    b_max = tl.full([b_head.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([b_head.shape[0]], tl.float32)
    if HAS_SINKS:
        b_max = tl.load(sinks + b_head, mask=m_row, other=float("-inf"))
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    return b_max, b_sum, tl.zeros([b_head.shape[0], PADDED_V], tl.float32)


@triton.jit(do_not_specialize=_VARYING)
def paged_attention_kernel(
    q,
    kv_cache,
    values_cache,
    scales_cache,
    out,
    block_table,
    query_start_loc,
    seq_lens,
    group_kv_heads,
    group_query_heads,
    sinks,
    scale,
    v_scale,
    window,
    soft_cap,
    num_requests,
    num_columns,
    num_blocks,
    q_stride_t,
    q_stride_h,
    stride_b,
    stride_h,
    stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    num_query_heads,
    table_stride,
    NUM_SLOTS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SCALES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Any batch. Grid: (tokens // TILE_Q + requests, groups), where TILE_Q = ROWS // GROUP tokens.

    kv_cache holds keys then values; if SCALES is block, values lie in values_cache, and scales follow both.
    scales_cache: per-(head, token) float32 scales of keys, each followed by that of the value. v_scale: the
    layer's; that of keys is in `scale`.
    """
    TILE_Q: tl.constexpr = ROWS // GROUP
    i_tile = tl.program_id(0)
    i_g = tl.program_id(1)
    i_r = _request_of(query_start_loc, i_tile, num_requests, TILE_Q)
    first_token = tl.load(query_start_loc + i_r)
    num_queries = tl.load(query_start_loc + i_r + 1) - first_token
    first_query = (i_tile - first_token // TILE_Q - i_r) * TILE_Q
    if first_query >= num_queries:
        return
    num_before = tl.load(seq_lens + i_r) - num_queries

    o_m = tl.arange(0, ROWS)
    o_query = first_query + o_m // GROUP
    m_row = (o_m < TILE_Q * GROUP) & (o_query < num_queries)
    b_head = tl.load(group_query_heads + i_g * GROUP + o_m % GROUP)
    m_row = m_row & (b_head >= 0)
    b_token = (first_token + o_query).to(tl.int64)
    b_q = _load_queries(
        q + b_token * q_stride_t + b_head.to(tl.int64) * q_stride_h, m_row, HEAD_K, PADDED_K, WIDEN
    )

    # Keys that some row of the tile sees, and of those the tiles that every row sees whole.
    end_key = num_before + tl.minimum(first_query + TILE_Q, num_queries)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(num_before + first_query - window + 1, 0)
    i_h = tl.load(group_kv_heads + i_g).to(tl.int64)
    p_cache = kv_cache + i_h * stride_h
    p_values, p_scales = p_cache, p_cache
    if SCALES == "block":
        p_values = values_cache + i_h * values_stride_h
    if SCALES == "token_head":
        p_scales = scales_cache + i_h * (stride_h // 4)
    p_table = block_table + i_r.to(tl.int64) * table_stride
    b_position = num_before + o_query
    b_max, b_sum, b_acc = _start_softmax(sinks, b_head, m_row, PADDED_V, HAS_SINKS)
    if not HAS_WINDOW:
        end_whole = (num_before + first_query + 1) // TILE_KEYS * TILE_KEYS
        b_max, b_sum, b_acc = _attend(
            b_q,
            b_position,
            b_max,
            b_sum,
            b_acc,
            p_cache,
            p_values,
            p_scales,
            p_table,
            num_columns,
            num_blocks,
            stride_b,
            stride_n,
            values_stride_b,
            values_stride_n,
            first_key,
            end_whole,
            scale,
            window,
            soft_cap,
            NUM_SLOTS,
            HEAD_K,
            HEAD_V,
            TILE_KEYS,
            False,
            True,
            HAS_CAP,
            SCALES,
            WIDEN,
        )
        first_key = end_whole
    b_max, b_sum, b_acc = _attend(
        b_q,
        b_position,
        b_max,
        b_sum,
        b_acc,
        p_cache,
        p_values,
        p_scales,
        p_table,
        num_columns,
        num_blocks,
        stride_b,
        stride_n,
        values_stride_b,
        values_stride_n,
        first_key,
        end_key,
        scale,
        window,
        soft_cap,
        NUM_SLOTS,
        HEAD_K,
        HEAD_V,
        TILE_KEYS,
        True,
        True,
        HAS_CAP,
        SCALES,
        WIDEN,
    )
    b_out = b_acc / tl.where(m_row, b_sum, 1.0)[:, None]
    if SCALES != "none":
        b_out *= v_scale
    o_v = tl.arange(0, PADDED_V)
    p_out = out + (b_token * num_query_heads + b_head) * HEAD_V
    tl.store(
        p_out[:, None] + o_v[None, :],
        b_out.to(out.dtype.element_ty),
        mask=m_row[:, None] & (o_v < HEAD_V)[None, :],
    )


@triton.jit(do_not_specialize=_VARYING)
def paged_attention_decode_kernel(
    q,
    kv_cache,
    values_cache,
    scales_cache,
    out,
    split_stats,
    block_table,
    seq_lens,
    group_kv_heads,
    group_query_heads,
    sinks,
    scale,
    v_scale,
    window,
    soft_cap,
    num_splits,
    num_columns,
    num_blocks,
    q_stride_t,
    q_stride_h,
    stride_b,
    stride_h,
    stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    num_query_heads,
    table_stride,
    NUM_SLOTS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SCALES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One token per request. Grid: (requests, groups, num_splits). Caches as in paged_attention_kernel.

    With IS_SPLIT, out is [R, Q, num_splits, Dv] float32, not divided; split_stats [R, Q, num_splits, 2]
    float32 takes maximum and sum. Splits without keys write nothing.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_g = tl.program_id(1)
    i_s = tl.program_id(2)
    seq_len = tl.load(seq_lens + i_r)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - window, 0)
    end_key = seq_len
    if IS_SPLIT:
        size = keys_per_split(seq_len - first_key, num_splits, TILE_KEYS)
        first_key += i_s * size
        if first_key >= seq_len:
            return
        end_key = tl.minimum(first_key + size, seq_len)

    o_m = tl.arange(0, ROWS)
    b_head = tl.load(group_query_heads + i_g * GROUP + o_m, mask=o_m < GROUP, other=-1)
    m_row = b_head >= 0
    b_q = _load_queries(
        q + i_r * q_stride_t + b_head.to(tl.int64) * q_stride_h, m_row, HEAD_K, PADDED_K, WIDEN
    )
    # A sink counts once: the combining kernel adds it where keys are split.
    b_max, b_sum, b_acc = _start_softmax(sinks, b_head, m_row, PADDED_V, HAS_SINKS and not IS_SPLIT)
    i_h = tl.load(group_kv_heads + i_g).to(tl.int64)
    p_cache = kv_cache + i_h * stride_h
    p_values, p_scales = p_cache, p_cache
    if SCALES == "block":
        p_values = values_cache + i_h * values_stride_h
    if SCALES == "token_head":
        p_scales = scales_cache + i_h * (stride_h // 4)
    p_table = block_table + i_r * table_stride
    end_whole = first_key + (end_key - first_key) // TILE_KEYS * TILE_KEYS
    b_max, b_sum, b_acc = _attend(
        b_q,
        o_m,
        b_max,
        b_sum,
        b_acc,
        p_cache,
        p_values,
        p_scales,
        p_table,
        num_columns,
        num_blocks,
        stride_b,
        stride_n,
        values_stride_b,
        values_stride_n,
        first_key,
        end_whole,
        scale,
        window,
        soft_cap,
        NUM_SLOTS,
        HEAD_K,
        HEAD_V,
        TILE_KEYS,
        False,
        False,
        HAS_CAP,
        SCALES,
        WIDEN,
    )
    b_max, b_sum, b_acc = _attend(
        b_q,
        o_m,
        b_max,
        b_sum,
        b_acc,
        p_cache,
        p_values,
        p_scales,
        p_table,
        num_columns,
        num_blocks,
        stride_b,
        stride_n,
        values_stride_b,
        values_stride_n,
        end_whole,
        end_key,
        scale,
        window,
        soft_cap,
        NUM_SLOTS,
        HEAD_K,
        HEAD_V,
        TILE_KEYS,
        True,
        False,
        HAS_CAP,
        SCALES,
        WIDEN,
    )
    if SCALES != "none":
        b_acc *= v_scale
    b_row = (i_r * num_query_heads + b_head) * num_splits + i_s
    if IS_SPLIT:
        p_stats = split_stats + b_row * 2
        tl.store(p_stats, b_max, mask=m_row)
        tl.store(p_stats + 1, b_sum, mask=m_row)
    else:
        # A request without any key (padding of a captured batch) gets zeros.
        b_acc = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    o_v = tl.arange(0, PADDED_V)
    tl.store(
        out + (b_row * HEAD_V)[:, None] + o_v[None, :],
        b_acc.to(out.dtype.element_ty),
        mask=m_row[:, None] & (o_v < HEAD_V)[None, :],
    )
