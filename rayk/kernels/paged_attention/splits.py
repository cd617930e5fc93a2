"""Splits the keys of a decode step over several programs, and combines their results, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_per_split(num_keys, num_splits, TILE_KEYS: tl.constexpr):
    """Whole tiles, so that only the last split with keys ends inside one."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), TILE_KEYS), 1) * TILE_KEYS


@triton.jit
def natural_log(b_max, b_total):
    """The log of b_total * 2^b_max; a maximum of -inf, without any key, stays it."""
    return (b_max + tl.log2(b_total)) * 0.6931471805599453


@triton.jit(do_not_specialize=("num_splits",))
def combine_splits_kernel(
    split_out,
    split_stats,
    out,
    lse,
    key_starts,
    seq_lens,
    sinks,
    window,
    num_splits,
    HEAD_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
):
    """Combine the splits of one (request, query head); maxima are in powers of two. Grid: (requests, query
    heads).

    IS_PARTIAL: of one (token, query head), whose keys are key_starts .. seq_lens - 1; lse [T, Q] takes the
    log of the sum of exponents.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    i_row = i_r * tl.num_programs(1) + i_h
    num_keys = tl.load(seq_lens + i_r)
    if IS_PARTIAL:
        num_keys -= tl.load(key_starts + i_r)
    if HAS_WINDOW:
        num_keys = tl.minimum(num_keys, window)
    num_live = tl.cdiv(num_keys, keys_per_split(num_keys, num_splits, TILE_KEYS))
    b_max = float("-inf")
    b_sum = 0.0
    if HAS_SINKS:
        b_max = tl.load(sinks + i_h) * 1.4426950408889634
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    o_v = tl.arange(0, PADDED_V)
    b_acc = tl.zeros([PADDED_V], tl.float32)
    for start in range(0, num_live, AT_ONCE):
        o_s = start + tl.arange(0, AT_ONCE)
        m_live = o_s < num_live
        p_split = split_stats + (i_row * num_splits + o_s) * 2
        b_split_max = tl.load(p_split, mask=m_live, other=float("-inf"))
        b_split_sum = tl.load(p_split + 1, mask=m_live, other=0.0)
        b_split = tl.load(
            split_out + ((i_row * num_splits + o_s) * HEAD_V)[:, None] + o_v[None, :],
            mask=m_live[:, None] & (o_v < HEAD_V)[None, :],
            other=0.0,
        )
        b_new_max = tl.maximum(b_max, tl.max(b_split_max, 0))
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weight = tl.exp2(b_split_max - b_base)
        b_shrink = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_shrink + tl.sum(b_split_sum * b_weight, 0)
        b_acc = b_acc * b_shrink + tl.sum(b_split * b_weight[:, None], 0)
        b_max = b_new_max
    b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = b_acc / b_total
    tl.store(out + i_row * HEAD_V + o_v, b_out.to(out.dtype.element_ty), mask=o_v < HEAD_V)
    if IS_PARTIAL:
        tl.store(lse + i_row, natural_log(b_max, b_total))
