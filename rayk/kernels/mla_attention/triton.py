"""The latent-attention kernel for a GPU. `launch` starts it.

A query tile has ROWS rows, each one (token, query head), token-major, starting anywhere in a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.paged_attention.content import load_rows
from rayk.kernels.paged_attention.softmax import (
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
def _attend(
    b_q_latent,
    b_q_rope,
    b_position,
    b_max,
    b_sum,
    b_acc,
    cache,
    rope_cache,
    scales_cache,
    p_table,
    num_columns,
    num_blocks,
    stride_b,
    stride_n,
    rope_stride_b,
    rope_stride_n,
    first_key,
    end_key,
    scale,
    window,
    NUM_SLOTS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALES: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Continue attending query rows to cached rows first_key .. end_key - 1 of one sequence.

    With CAUSAL a query sees the `window` of rows up to b_position, else all. b_max and b_sum [ROWS], and
    b_acc [ROWS, padded], the weighted latents not yet divided, are the softmax so far (see softmax.weigh);
    returns them updated. Whole tiles are masked as others are: scores are few beside the latents.
    """
    o_t = tl.arange(0, TILE_KEYS)
    last_key = tl.maximum(end_key - 1, 0)
    b_block = load_block_ids(p_table, first_key + o_t, last_key, num_columns, NUM_SLOTS)
    b_unknown = tl.zeros([TILE_KEYS], tl.int32)
    for start in range(first_key, end_key, TILE_KEYS):
        o_key = start + o_t
        b_next = load_block_ids(p_table, o_key + TILE_KEYS, last_key, num_columns, NUM_SLOTS)
        # Keys after the last one repeat it: what lies there is never read.
        o_slot = tl.minimum(o_key, last_key) % NUM_SLOTS
        m_known = b_block.to(tl.uint32) < num_blocks.to(tl.uint32)
        o_row = row_offsets(b_block, m_known, o_slot, stride_b, stride_n, ALIGN)
        p_row = cache + o_row
        # Not p_row + LATENT: Triton 3.7 fails to lay that out for sm_80.
        p_rope = (cache + LATENT) + o_row
        b_scale, b_rope_scale = None, None
        if SCALES == "block":
            p_rope = rope_cache + row_offsets(b_block, m_known, o_slot, rope_stride_b, rope_stride_n, ALIGN)
        if SCALES == "token_head":
            p_scale = scales_cache + row_offsets(b_block, m_known, o_slot, stride_b, stride_n, ALIGN // 4)
            b_scale, b_rope_scale = tl.load(p_scale), tl.load(p_scale + 1)
        # Masked because these are the values too: a weight of zero does not undo a NaN.
        b_latent = load_rows(
            p_row,
            b_scale,
            m_known,
            b_q_latent.dtype,
            LATENT,
            b_q_latent.shape[1],
            SCALES,
            CAUSAL,
            HAS_E4M3,
            WIDEN,
            True,
        )
        b_rope = load_rows(
            p_rope,
            b_rope_scale,
            m_known,
            b_q_rope.dtype,
            ROPE,
            b_q_rope.shape[1],
            SCALES,
            False,
            HAS_E4M3,
            WIDEN,
            True,
        )
        b_scores = tl.dot(b_q_rope, tl.trans(b_rope), input_precision="ieee")
        b_scores = tl.dot(b_q_latent, tl.trans(b_latent), b_scores, input_precision="ieee")
        b_scores = hide(b_scores, m_known, o_key, b_position, last_key, window, True, CAUSAL)
        if not CAUSAL:
            # Every query sees every key: one of an unknown block makes them all NaN, below.
            b_unknown |= tl.where(m_known, 0, 1)
        b_max, b_p, b_shrink = weigh(b_scores, b_max, scale, CAUSAL)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_latent.dtype), b_latent, b_acc * b_shrink[:, None], input_precision="ieee")
        b_block = b_next
    b_sum = tl.where(tl.max(b_unknown, 0) > 0, float("nan"), b_sum)
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=_VARYING)
def mla_attention_kernel(
    q,
    cache,
    rope_cache,
    scales_cache,
    out,
    lse,
    split_stats,
    block_table,
    query_start_loc,
    key_rows,
    key_starts,
    seq_lens,
    scale,
    row_scale,
    num_requests,
    num_splits,
    num_columns,
    num_blocks,
    q_stride_t,
    q_stride_h,
    stride_b,
    stride_n,
    rope_stride_b,
    rope_stride_n,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    SCALES: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Any batch. Grid: (tokens * heads // ROWS + requests, 1).

    cache holds latents then rotated keys; if SCALES is block, the keys lie in rope_cache, and scales follow
    both. Their strides are in multiples of ALIGN elements. scales_cache: per-token float32 scales of latents,
    each followed by that of the rotated key. scale: of scores, in powers of two. row_scale: the layer's, also
    part of `scale`.

    ONE_TOKEN: one token per request. Grid: (requests * cdiv(heads, ROWS), num_splits). With IS_SPLIT, out is
    [R, Q, num_splits, LATENT] float32, not divided, and split_stats [R, Q, num_splits, 2] float32 takes
    maximum and sum. Splits without keys write nothing.

    IS_PARTIAL: a token sees rows key_starts .. seq_lens - 1 of the sequence in row key_rows of the block
    table ([T] each, one row for all tokens of a request). With ONE_TOKEN these are tokens instead of
    requests, and IS_SPLIT always; without, lse [T, Q] takes the log of each sum of exponents.
    """
    # The last tiles of a request see the most rows, and start first.
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_s = tl.program_id(1)
    if ONE_TOKEN:
        NUM_TILES: tl.constexpr = (NUM_HEADS + ROWS - 1) // ROWS
        i_r = i_tile // NUM_TILES
        first_token = i_r
        num_queries = 1
        first_row = i_tile % NUM_TILES * ROWS
    else:
        i_r = request_of(query_start_loc, i_tile, num_requests, NUM_HEADS, ROWS)
        first_token = tl.load(query_start_loc + i_r)
        num_queries = tl.load(query_start_loc + i_r + 1) - first_token
        first_row = (i_tile - first_token * NUM_HEADS // ROWS - i_r) * ROWS
        if first_row >= num_queries * NUM_HEADS:
            return
    o_m = first_row + tl.arange(0, ROWS)
    # Rows beyond the last repeat it: masks of them would take registers for the whole loop.
    o_row = tl.minimum(o_m, num_queries * NUM_HEADS - 1)
    o_token = o_row // NUM_HEADS
    if IS_PARTIAL and not ONE_TOKEN:
        m_own = o_m < num_queries * NUM_HEADS
        first_key, end_key, b_position, b_window = bounds_of(
            key_starts, seq_lens, first_token + o_token, m_own
        )
    else:
        num_before = tl.load(seq_lens + i_r) - num_queries
        first_key = tl.load(key_starts + i_r) if IS_PARTIAL else 0
        end_key = num_before + tl.minimum((first_row + ROWS - 1) // NUM_HEADS + 1, num_queries)
        b_position = num_before + o_token
        b_window = 2**31 - 1
    if IS_SPLIT:
        size = keys_per_split(end_key - first_key, num_splits, TILE_KEYS)
        first_key += i_s * size
        if first_key >= end_key:
            return
        end_key = tl.minimum(first_key + size, end_key)

    p_q = q + (first_token + o_token).to(tl.int64) * q_stride_t + o_row % NUM_HEADS * q_stride_h
    o_latent = tl.arange(0, PADDED_LATENT)
    o_rope = tl.arange(0, PADDED_ROPE)
    m_latent = (o_latent < LATENT)[None, :]
    b_q_latent = tl.load(p_q[:, None] + o_latent[None, :], mask=m_latent, other=0.0)
    b_q_rope = tl.load(p_q[:, None] + LATENT + o_rope[None, :], mask=(o_rope < ROPE)[None, :], other=0.0)
    if WIDEN:
        b_q_latent = b_q_latent.to(tl.float32)
        b_q_rope = b_q_rope.to(tl.float32)
    # Where every row sees a key, a score that is NaN may be all it sees: its maximum then stays finite.
    b_max = tl.full([ROWS], -3.0e38 if ONE_TOKEN else float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, PADDED_LATENT], tl.float32)
    p_table = table_of(block_table, key_rows, i_r, first_token, table_stride, IS_PARTIAL)
    b_max, b_sum, b_acc = _attend(
        b_q_latent,
        b_q_rope,
        b_position,
        b_max,
        b_sum,
        b_acc,
        cache,
        rope_cache,
        scales_cache,
        p_table,
        num_columns,
        num_blocks,
        stride_b,
        stride_n,
        rope_stride_b,
        rope_stride_n,
        first_key,
        end_key,
        scale,
        b_window,
        NUM_SLOTS,
        LATENT,
        ROPE,
        TILE_KEYS,
        not ONE_TOKEN,
        SCALES,
        ALIGN,
        HAS_E4M3,
        WIDEN,
    )
    if SCALES != "none":
        b_acc *= row_scale
    b_out_row = (first_token.to(tl.int64) * NUM_HEADS + o_m) * num_splits + i_s
    m_row = o_m < num_queries * NUM_HEADS
    if IS_SPLIT:
        p_stats = split_stats + b_out_row * 2
        tl.store(p_stats, b_max, mask=m_row)
        tl.store(p_stats + 1, b_sum, mask=m_row)
    else:
        # A request without any key (padding of a captured batch) gets zeros.
        b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
        b_acc = b_acc / b_total[:, None]
        if IS_PARTIAL:
            tl.store(lse + b_out_row, natural_log(b_max, b_total), mask=m_row)
    p_out = out + b_out_row * LATENT
    tl.store(
        p_out[:, None] + o_latent[None, :], b_acc.to(out.dtype.element_ty), mask=m_row[:, None] & m_latent
    )
