"""The digest on a GPU, all views of a rank in one launch (lanes.py): each program sums the hashes of some
words of one lane, many rows of a few words or one row of many.

Sums modulo 2^64 commute, so the result equals reference.py's to the bit in any order. A field's words may
start anywhere: they are loaded in pieces as wide as strides and starts allow, and put together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from rayk.kernels.digest.lanes import SECTION_COLUMNS, TILE_WORDS, concatenated
from rayk.kernels.digest.views import DigestedViews, RowPlaces
from rayk.kernels.interpreter import launching

_TILE_WORDS, _SECTION_COLUMNS = tl.constexpr(TILE_WORDS), tl.constexpr(SECTION_COLUMNS)


@triton.jit
def _mix(x):
    """Mix uint64 with splitmix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _add_tile(
    lanes,
    i_lane,
    num_lanes,
    p_rows,
    num_rows,
    first_group,
    i_tile,
    rows_per_group,
    p_out,
    p_not_finite,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """Add tile `i_tile` of a lane, of TILE_R rows x TILE_W words, to its words in `p_out`."""
    p_lane = lanes + i_lane
    # Nobody but the table knows what divides words and addresses: without it every word would go alone.
    VECTOR: tl.constexpr = ALIGNMENT // WORD if ALIGNMENT > WORD else 1
    num_words = tl.multiple_of(tl.load(p_lane + 3 * num_lanes), VECTOR)
    key, finite_mask = tl.load(p_lane + 4 * num_lanes), tl.load(p_lane + 5 * num_lanes)
    finite_step = tl.load(p_lane + 6 * num_lanes)
    num_word_tiles = (num_words + (TILE_W - 1)) // TILE_W
    o_r = (i_tile // num_word_tiles) * TILE_R + tl.arange(0, TILE_R)
    o_w = (i_tile % num_word_tiles) * TILE_W + tl.arange(0, TILE_W)
    m_r = o_r < num_rows
    mask = m_r[:, None] & (o_w < num_words)[None, :]
    b_block, b_slot = (
        tl.load(p_rows + o_r, mask=m_r, other=0),
        tl.load(p_rows + num_rows + o_r, mask=m_r, other=0),
    )
    b_row = tl.load(p_rows + 2 * num_rows + o_r, mask=m_r, other=0)
    o_byte = b_block * tl.load(p_lane + num_lanes) + b_slot * tl.load(p_lane + 2 * num_lanes)
    o_byte = tl.multiple_of(o_byte + tl.load(p_lane), ALIGNMENT)
    p_byte = lanes.to(tl.pointer_type(tl.int8), bitcast=True) + o_byte
    PIECE: tl.constexpr = WORD if WORD < ALIGNMENT else ALIGNMENT
    if PIECE == 8:
        p_row = p_byte.to(tl.pointer_type(tl.int64), bitcast=True)
    elif PIECE == 4:
        p_row = p_byte.to(tl.pointer_type(tl.int32), bitcast=True)
    elif PIECE == 2:
        p_row = p_byte.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        p_row = p_byte.to(tl.pointer_type(tl.int8), bitcast=True)
    p_piece = p_row[:, None] + (o_w * (WORD // PIECE))[None, :]
    LAST: tl.constexpr = WORD // PIECE - 1
    # The last piece carries the sign, the others only their bits.
    b_word = tl.load(p_piece + LAST, mask=mask, other=0).to(tl.int64)
    for back in tl.static_range(LAST):
        b_piece = tl.load(p_piece + (LAST - 1 - back), mask=mask, other=0).to(tl.int64)
        b_word = (b_word << (8 * PIECE)) | (b_piece & ((1 << (8 * PIECE)) - 1))

    # What is masked is 0, which is finite.
    b_bad = ((b_word & finite_mask) + finite_step) & (finite_mask + finite_step)
    is_bad = tl.max(tl.max((b_bad != 0).to(tl.int32), axis=1), axis=0)
    tl.store(p_not_finite, 1, mask=is_bad != 0)

    b_key = key.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    b_row_key = _mix(b_key ^ b_row.to(tl.uint64, bitcast=True))
    b_index = _mix(o_w.to(tl.uint64) ^ 0x61C8864680B583EA)  # ~0x9E3779B97F4A7C15
    b_mixed = _mix(b_word.to(tl.uint64, bitcast=True) ^ (b_row_key[:, None] + b_index[None, :]))
    b_sum = tl.sum(tl.where(mask, b_mixed, 0).to(tl.int64, bitcast=True), axis=1)

    b_group = b_row // rows_per_group - first_group
    low = tl.min(tl.where(m_r, b_group, 1 << 62), axis=0)
    high = tl.max(tl.where(m_r, b_group, 0), axis=0)
    # Rows come in order, so that these are one or two.
    for i_group in range(low, high + 1):
        tl.atomic_add(p_out + i_group, tl.sum(tl.where(m_r & (b_group == i_group), b_sum, 0), axis=0))


@triton.jit(
    do_not_specialize=("num_lanes", "num_out", "rows_per_group"),
    do_not_specialize_on_alignment=("sections", "outs", "rows", "out"),
)
def digest_kernel(
    lanes,
    sections,
    outs,
    rows,
    out,
    num_lanes,
    num_out,
    rows_per_group,
    NUM_SECTIONS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """Grid: the programs of all sections. lanes, sections: see lanes.LaneTable. outs [lanes]: the first word
    of each in `out`, which is added to; its last one is set if any value is not finite. WORD bytes of a word
    are loaded in pieces no wider than ALIGNMENT."""
    i_program = tl.program_id(0).to(tl.int64)
    b_first = tl.load(sections + tl.arange(0, NUM_SECTIONS) * _SECTION_COLUMNS)
    p_section = sections + (tl.sum((b_first <= i_program).to(tl.int64), axis=0) - 1) * _SECTION_COLUMNS
    i_program -= tl.load(p_section)
    each, num_rows = tl.load(p_section + 2), tl.load(p_section + 3)
    first_group, p_rows = tl.load(p_section + 4), rows + tl.load(p_section + 5)
    i_lane = tl.load(p_section + 1) + i_program // each
    p_out, p_not_finite = out + tl.load(outs + i_lane), out + num_out
    if tl.load(p_section + 6) != 0:
        _add_tile(
            lanes,
            i_lane,
            num_lanes,
            p_rows,
            num_rows,
            first_group,
            i_program % each,
            rows_per_group,
            p_out,
            p_not_finite,
            WORD,
            ALIGNMENT,
            1,
            _TILE_WORDS,
        )
    else:
        _add_tile(
            lanes,
            i_lane,
            num_lanes,
            p_rows,
            num_rows,
            first_group,
            i_program % each,
            rows_per_group,
            p_out,
            p_not_finite,
            WORD,
            ALIGNMENT,
            _TILE_WORDS // TILE_W,
            TILE_W,
        )


def digest_views_triton(
    digested: DigestedViews, places: Sequence[RowPlaces], rows_per_group: int
) -> torch.Tensor:
    device = digested.views[0].kv_cache.device
    counts = np.array([[len(p.rows), p.first_group] for p in places], dtype=np.int64)
    num_rows, first_group = counts.T
    rows_at = 3 * (np.cumsum(num_rows) - num_rows)
    first_words, num_out = digested.addresses.first_words(tuple(p.num_groups for p in places))
    tables = digested.lane_tables
    made = [table.for_request(num_rows, first_group, rows_at) for table in tables]
    own = [
        part
        for table, (sections, _) in zip(tables, made, strict=True)
        for part in (sections, first_words[table.entry])
    ]
    of_rows = [a for p in places for a in (p.block_ids, p.slots, p.rows)]
    *parts, rows = concatenated([*own, np.concatenate(of_rows)], device)
    out = torch.zeros(num_out + 1, dtype=torch.int64, device=device)
    for table, (_, num_programs), sections, outs in zip(tables, made, parts[::2], parts[1::2], strict=True):
        if not num_programs:
            continue
        with launching():
            digest_kernel[(num_programs,)](
                table.lanes,
                sections,
                outs,
                rows,
                out,
                len(table.entry),
                num_out,
                rows_per_group,
                NUM_SECTIONS=table.num_padded_sections,
                WORD=table.word,
                ALIGNMENT=table.alignment,
                TILE_W=table.tile_words,
                num_warps=4,
            )
    return out
