"""Paged attention kernels for a GPU: online softmax over tiles of keys. `launch` starts them.

A query tile has ROWS rows, each one (token, query head of the group).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.elements import tanh
from rayk.kernels.paged_attention.content import load_rows
from rayk.kernels.paged_attention.softmax import (
    add_sinks,
    bounds_of,
    hide,
    load_block_ids,
    request_of,
    row_offsets,
    table_of,
    weigh,
)
from rayk.kernels.paged_attention.splits import keys_per_split, natural_log

# Integers that change from step to step: specialising on them (1, multiples of 16) would compile again.
_VARYING = ("num_requests", "num_columns", "num_blocks", "num_splits", "table_stride")


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
    cap_scale,
    window,
    NUM_SLOTS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    EDGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SCALES: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Continue attending query rows to keys first_key .. end_key - 1 of one sequence and KV head.

    Without EDGE these are whole tiles that every row sees; with EDGE the last may be cut, and with CAUSAL too
    a row sees what its position allows. b_max and b_sum [ROWS], and b_acc [ROWS, PADDED_V], the weighted sum
    of values not yet divided, are the softmax so far (see softmax.weigh); returns them updated.
    """
    SOME_HIDDEN: tl.constexpr = EDGE and CAUSAL
    o_t = tl.arange(0, TILE_KEYS)
    last_key = tl.maximum(end_key - 1, 0)
    b_block = load_block_ids(p_table, first_key + o_t, last_key, num_columns, NUM_SLOTS)
    b_unknown = tl.zeros([TILE_KEYS], tl.int32)
    if not CAUSAL:
        # Weights of a tile of few rows: their sum over warps is taken once, at the end.
        b_weights = tl.zeros([b_q.shape[0], TILE_KEYS], tl.float32)
    for start in range(first_key, end_key, TILE_KEYS):
        o_key = start + o_t
        b_next = load_block_ids(p_table, o_key + TILE_KEYS, last_key, num_columns, NUM_SLOTS)
        # Keys after the last one repeat it: what lies there is never read.
        o_slot = (tl.minimum(o_key, last_key) if EDGE else o_key) % NUM_SLOTS
        m_known = b_block.to(tl.uint32) < num_blocks.to(tl.uint32)
        p_row = p_cache + row_offsets(b_block, m_known, o_slot, stride_b, stride_n, ALIGN)
        p_value = p_row + HEAD_K
        if SCALES == "block":
            p_value = p_values + row_offsets(
                b_block, m_known, o_slot, values_stride_b, values_stride_n, ALIGN
            )
        b_key_scale, b_value_scale = None, None
        if SCALES == "token_head":
            # Of a key, then of its value. Pages are whole float32s.
            p_scale = p_scales + row_offsets(b_block, m_known, o_slot, stride_b, stride_n, ALIGN // 4)
            b_key_scale, b_value_scale = tl.load(p_scale), tl.load(p_scale + 1)
        b_k = load_rows(
            p_row, None, m_known, b_q.dtype, HEAD_K, b_q.shape[1], SCALES, False, HAS_E4M3, WIDEN, False
        )
        # A weight of zero does not undo a NaN.
        b_v = load_rows(
            p_value,
            b_value_scale,
            m_known,
            b_q.dtype,
            HEAD_V,
            PADDED_V,
            SCALES,
            SOME_HIDDEN,
            HAS_E4M3,
            WIDEN,
            False,
        )
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if SCALES == "token_head":
            b_scores *= b_key_scale[None, :]
        if HAS_CAP:
            b_scores = tanh(b_scores * cap_scale)
        b_scores = hide(b_scores, m_known, o_key, b_position, last_key, window, EDGE, CAUSAL)
        if not SOME_HIDDEN:
            # Every row sees every key: one of an unknown block makes them all NaN, below.
            b_unknown |= tl.where(m_known, 0, 1)
        b_max, b_p, b_shrink = weigh(b_scores, b_max, scale, SOME_HIDDEN)
        if CAUSAL:
            b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        else:
            b_weights = b_weights * b_shrink[:, None] + b_p
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
        b_block = b_next
    if not CAUSAL:
        b_sum += tl.sum(b_weights, 1)
    b_sum = tl.where(tl.max(b_unknown, 0) > 0, float("nan"), b_sum)
    return b_max, b_sum, b_acc


@triton.jit
def _start_softmax(sinks, b_head, m_row, PADDED_V: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Start the softmax before the first key (see _attend). A sink's weight is added at the end."""
    b_max = tl.full([b_head.shape[0]], float("-inf"), tl.float32)
    if HAS_SINKS:
        b_max = tl.load(sinks + b_head, mask=m_row, other=float("-inf")) * 1.4426950408889634
    b_sum = tl.zeros([b_head.shape[0]], tl.float32)
    return b_max, b_sum, tl.zeros([b_head.shape[0], PADDED_V], tl.float32)


@triton.jit(do_not_specialize=_VARYING)
def paged_attention_kernel(
    q,
    kv_cache,
    values_cache,
    scales_cache,
    out,
    lse,
    block_table,
    query_start_loc,
    key_rows,
    key_starts,
    seq_lens,
    group_kv_heads,
    group_query_heads,
    sinks,
    scale,
    v_scale,
    cap_scale,
    window,
    num_requests,
    num_groups,
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
    ALIGN: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Any batch. Grid: ((tokens // TILE_Q + requests) * groups,), where TILE_Q = ROWS // GROUP tokens.

    kv_cache holds keys then values; if SCALES is block, values lie in values_cache, and scales follow both.
    Their strides are in multiples of ALIGN elements, of which their addresses are multiples too.
    scales_cache: per-(head, token) float32 scales of keys, each followed by that of the value. scale: of
    scores, in powers of two, the layer's scale of keys included; cap_scale: that of scores inside the soft
    cap's tanh. v_scale: the layer's, of values.

    IS_PARTIAL: a token sees keys key_starts .. seq_lens - 1 of the sequence in row key_rows of the block
    table ([T] each, one row for all tokens of a request); lse [T, Q] takes the log of its sum of exponents.
    """
    TILE_Q: tl.constexpr = ROWS // GROUP
    # The last tiles of a request see the most keys, and start first.
    i_tile = tl.num_programs(0) // num_groups - 1 - tl.program_id(0) // num_groups
    i_g = tl.program_id(0) % num_groups
    i_r = request_of(query_start_loc, i_tile, num_requests, 1, TILE_Q)
    first_token = tl.load(query_start_loc + i_r)
    num_queries = tl.load(query_start_loc + i_r + 1) - first_token
    first_query = (i_tile - first_token // TILE_Q - i_r) * TILE_Q
    if first_query >= num_queries:
        return

    o_m = tl.arange(0, ROWS)
    o_query = first_query + o_m // GROUP
    m_row = (o_m < TILE_Q * GROUP) & (o_query < num_queries)
    b_head = tl.load(group_query_heads + i_g * GROUP + o_m % GROUP)
    m_row = m_row & (b_head >= 0)
    b_token = (first_token + o_query).to(tl.int64)
    b_q = _load_queries(
        q + b_token * q_stride_t + b_head.to(tl.int64) * q_stride_h, m_row, HEAD_K, PADDED_K, WIDEN
    )

    if IS_PARTIAL:
        first_key, end_key, b_position, b_window = bounds_of(key_starts, seq_lens, b_token, m_row)
    else:
        # Keys that some row of the tile sees.
        num_before = tl.load(seq_lens + i_r) - num_queries
        end_key = num_before + tl.minimum(first_query + TILE_Q, num_queries)
        first_key = tl.maximum(num_before + first_query - window + 1, 0) if HAS_WINDOW else 0
        b_position = num_before + o_query
        b_window = window
    i_h = tl.load(group_kv_heads + i_g).to(tl.int64)
    p_cache = tl.multiple_of(kv_cache + i_h * stride_h * ALIGN, ALIGN_BYTES)
    p_values, p_scales = p_cache, p_cache
    if SCALES == "block":
        p_values = tl.multiple_of(values_cache + i_h * values_stride_h * ALIGN, ALIGN_BYTES)
    if SCALES == "token_head":
        p_scales = scales_cache + i_h * stride_h * (ALIGN // 4)
    p_table = table_of(block_table, key_rows, i_r, first_token, table_stride, IS_PARTIAL)
    b_max, b_sum, b_acc = _start_softmax(sinks, b_head, m_row, PADDED_V, HAS_SINKS)
    b_sink = b_max
    if not HAS_WINDOW and not IS_PARTIAL:
        # Of these keys the tiles that every row sees whole.
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
            cap_scale,
            window,
            NUM_SLOTS,
            HEAD_K,
            HEAD_V,
            PADDED_V,
            TILE_KEYS,
            False,
            True,
            HAS_CAP,
            SCALES,
            ALIGN,
            HAS_E4M3,
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
        cap_scale,
        b_window,
        NUM_SLOTS,
        HEAD_K,
        HEAD_V,
        PADDED_V,
        TILE_KEYS,
        True,
        True,
        HAS_CAP,
        SCALES,
        ALIGN,
        HAS_E4M3,
        WIDEN,
    )
    if HAS_SINKS:
        b_sum = add_sinks(b_sum, b_max, b_sink)
    b_total = tl.where(m_row & (b_sum != 0.0), b_sum, 1.0)
    b_out = b_acc / b_total[:, None]
    if SCALES != "none":
        b_out *= v_scale
    o_v = tl.arange(0, PADDED_V)
    p_out = out + (b_token * num_query_heads + b_head) * HEAD_V
    tl.store(
        p_out[:, None] + o_v[None, :],
        b_out.to(out.dtype.element_ty),
        mask=m_row[:, None] & (o_v < HEAD_V)[None, :],
    )
    if IS_PARTIAL:
        tl.store(lse + b_token * num_query_heads + b_head, natural_log(b_max, b_total), mask=m_row)


@triton.jit(do_not_specialize=_VARYING)
def paged_attention_decode_kernel(
    q,
    kv_cache,
    values_cache,
    scales_cache,
    out,
    split_stats,
    block_table,
    key_rows,
    key_starts,
    seq_lens,
    group_kv_heads,
    group_query_heads,
    sinks,
    scale,
    v_scale,
    cap_scale,
    window,
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
    ALIGN: tl.constexpr,
    ALIGN_BYTES: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One token per request. Grid: (requests, groups, num_splits). Caches as in paged_attention_kernel.

    With IS_SPLIT, out is [R, Q, num_splits, Dv] float32, not divided; split_stats [R, Q, num_splits, 2]
    float32 takes maximum and sum. Splits without keys write nothing.

    IS_PARTIAL: keys as there, tokens instead of requests; IS_SPLIT always.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_g = tl.program_id(1)
    i_s = tl.program_id(2)
    seq_len = tl.load(seq_lens + i_r)
    first_key = tl.load(key_starts + i_r) if IS_PARTIAL else 0
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
    b_sink = b_max
    i_h = tl.load(group_kv_heads + i_g).to(tl.int64)
    p_cache = tl.multiple_of(kv_cache + i_h * stride_h * ALIGN, ALIGN_BYTES)
    p_values, p_scales = p_cache, p_cache
    if SCALES == "block":
        p_values = tl.multiple_of(values_cache + i_h * values_stride_h * ALIGN, ALIGN_BYTES)
    if SCALES == "token_head":
        p_scales = scales_cache + i_h * stride_h * (ALIGN // 4)
    p_table = table_of(block_table, key_rows, i_r, i_r, table_stride, IS_PARTIAL)
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
        end_key,
        scale,
        cap_scale,
        window,
        NUM_SLOTS,
        HEAD_K,
        HEAD_V,
        PADDED_V,
        TILE_KEYS,
        True,
        False,
        HAS_CAP,
        SCALES,
        ALIGN,
        HAS_E4M3,
        WIDEN,
    )
    if SCALES != "none":
        b_acc *= v_scale
    b_row = (i_r * num_query_heads + b_head) * num_splits + i_s
    if HAS_SINKS and not IS_SPLIT:
        b_sum = add_sinks(b_sum, b_max, b_sink)
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
