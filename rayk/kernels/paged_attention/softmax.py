"""What the attention kernels share: they find a tile's request and its keys' blocks, and weigh scores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of(
    query_start_loc, i_tile, num_requests, ROWS_PER_TOKEN: tl.constexpr, ROWS_PER_TILE: tl.constexpr
):
    """The last request whose tiles start at or before i_tile."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) * ROWS_PER_TOKEN // ROWS_PER_TILE + middle <= i_tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def load_block_ids(p_table, o_key, last_key, num_columns, NUM_SLOTS: tl.constexpr):
    """Load the block of each key, -1 beyond the table; keys after the last one stand for the last.

    Kernels load the ids of the next tile in each turn of their loop. Triton then takes the loads of keys and
    values for direct ones, and keeps as many tiles of them in flight as it has stages.
    """
    o_column = tl.minimum(o_key, last_key) // NUM_SLOTS
    return tl.load(p_table + o_column, mask=o_column < num_columns, other=-1)


@triton.jit
def row_offsets(b_block, m_known, o_slot, stride_b, stride_n, ALIGN: tl.constexpr):
    """Offsets of rows in a cache whose strides are given in multiples of ALIGN. Unknown blocks become block
    0."""
    b_block = tl.where(m_known, b_block, 0).to(tl.int64)
    return (b_block * stride_b + o_slot * stride_n) * ALIGN


@triton.jit
def hide(b_scores, m_known, o_key, b_row, last_key, window, EDGE: tl.constexpr, CAUSAL: tl.constexpr):
    """Take out the scores that a row must not see: of keys after last_key if EDGE, and with CAUSAL too those
    that are not among the `window` up to its position, b_row. What it sees of unknown blocks becomes
    NaN then. window: a number, or one of each row, [ROWS, 1]."""
    if EDGE and CAUSAL:
        b_scores += tl.where(m_known, 0.0, float("nan"))[None, :]
        # As unsigned numbers, keys after the row are far away: one comparison for both borders.
        m_seen = (b_row[:, None] - o_key[None, :]).to(tl.uint32) < window
        b_scores = tl.where(m_seen, b_scores, float("-inf"))
    elif EDGE:
        b_scores = tl.where((o_key <= last_key)[None, :], b_scores, float("-inf"))
    return b_scores


@triton.jit
def table_of(block_table, key_rows, i_r, i_token, table_stride, IS_PARTIAL: tl.constexpr):
    """Point at the block table's row of request i_r or, of partial attention, of its token i_token."""
    i_row = i_r
    if IS_PARTIAL:
        i_row = tl.load(key_rows + i_token)
    return block_table + i_row.to(tl.int64) * table_stride


@triton.jit
def bounds_of(key_starts, key_ends, b_token, m_row):
    """Load what tokens b_token [ROWS] see: each its keys key_starts .. key_ends - 1, nothing outside m_row.

    Returns the first key that one of them sees, the end of the last one, and each token's last key [ROWS] and
    number of keys [ROWS, 1], for `hide`.
    """
    b_start = tl.load(key_starts + b_token, mask=m_row, other=0)
    b_end = tl.load(key_ends + b_token, mask=m_row, other=0)
    b_count = tl.maximum(b_end - b_start, 0)
    end_key = tl.max(b_end, 0)
    first_key = tl.min(tl.where(b_count > 0, b_start, end_key), 0)
    return first_key, end_key, b_end - 1, b_count[:, None].to(tl.uint32)


@triton.jit
def weigh(b_scores, b_max, scale, SOME_SEE_NOTHING: tl.constexpr):
    """Take the online softmax on by one tile, in powers of two: `scale` holds log2(e) and is positive.

    Returns the maximum of b_max and b_scores * scale, the weights, and the factor of what was summed before.
    """
    b_new_max = tl.maximum(b_max, tl.max(b_scores, 1) * scale)
    b_base = b_new_max
    if SOME_SEE_NOTHING:
        # Keep -inf - -inf out of the exponent.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    # Rounded once: what the maximum lost to rounding, all weights share.
    b_p = tl.exp2(tl.fma(b_scores, scale, -b_base[:, None]))
    return b_new_max, b_p, tl.exp2(b_max - b_base)


@triton.jit
def add_sinks(b_sum, b_max, b_sink):
    """Add the sinks' weights (b_sink: their scores, in powers of two) to sums relative to b_max >= b_sink."""
    return b_sum + tl.where(b_sink == float("-inf"), 0.0, tl.exp2(b_sink - b_max))
