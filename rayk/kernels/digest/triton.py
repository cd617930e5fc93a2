"""The digest on a GPU: one program per (tile of rows and words, head, field) sums its words' hashes.

Sums modulo 2^64 commute, so the result equals reference.py's to the bit in any order. A field's words may
start anywhere: they are loaded in pieces as wide as strides and starts allow, and put together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from rayk.kernels.digest.reference import coordinate_keys, not_finite_bits, word_bytes
from rayk.kernels.interpreter import launching

TILE_WORDS = 1024
"""Words per program: 8 a thread with 4 warps, enough to hide a load behind the mixing of another."""


@triton.jit
def _mix(x):
    """Mix uint64 with splitmix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=("num_rows", "rows_per_group", "first_group", "num_groups"))
def digest_kernel(
    kv_cache,
    block_ids,
    slots,
    rows,
    keys,
    starts,
    num_words,
    out,
    not_finite,
    num_rows,
    num_heads,
    rows_per_group,
    first_group,
    num_groups,
    stride_b,
    stride_h,
    stride_n,
    MASK: tl.constexpr,
    STEP: tl.constexpr,
    WORD: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
    NUM_W_TILES: tl.constexpr,
):
    """Grid: (row tiles x word tiles, heads, fields). Strides and starts in bytes; WORD bytes of a word are
    loaded PIECE at a time. keys [F, H], out [F, H, groups], which is added to. MASK, STEP: see
    `not_finite_bits`."""
    i_h, i_f = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_tile = tl.program_id(0)
    o_r = (i_tile // NUM_W_TILES) * TILE_R + tl.arange(0, TILE_R)
    o_w = (i_tile % NUM_W_TILES) * TILE_W + tl.arange(0, TILE_W)
    m_r, m_w = o_r < num_rows, o_w < tl.load(num_words + i_f)
    mask = m_r[:, None] & m_w[None, :]
    b_row = tl.load(rows + o_r, mask=m_r, other=0)
    b_block, b_slot = tl.load(block_ids + o_r, mask=m_r, other=0), tl.load(slots + o_r, mask=m_r, other=0)
    o_byte = b_block * stride_b + b_slot * stride_n + i_h * stride_h + tl.load(starts + i_f)
    p_word = kv_cache + (o_byte[:, None] + (o_w * WORD)[None, :])

    if PIECE == 8:
        p_piece = p_word.to(tl.pointer_type(tl.int64), bitcast=True)
    elif PIECE == 4:
        p_piece = p_word.to(tl.pointer_type(tl.int32), bitcast=True)
    elif PIECE == 2:
        p_piece = p_word.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        p_piece = p_word.to(tl.pointer_type(tl.int8), bitcast=True)
    LAST: tl.constexpr = WORD // PIECE - 1
    # The last piece carries the sign, the others only their bits.
    b_word = tl.load(p_piece + LAST, mask=mask, other=0).to(tl.int64)
    for back in tl.static_range(LAST):
        b_piece = tl.load(p_piece + (LAST - 1 - back), mask=mask, other=0).to(tl.int64)
        b_word = (b_word << (8 * PIECE)) | (b_piece & ((1 << (8 * PIECE)) - 1))

    if MASK != 0:
        HIGHEST: tl.constexpr = MASK + STEP
        b_bad = ((b_word.to(tl.uint64, bitcast=True) & MASK) + STEP) & HIGHEST
        is_bad = tl.max(tl.max((b_bad != 0).to(tl.int32), axis=1), axis=0)
        tl.store(not_finite, 1, mask=is_bad != 0)

    b_key = tl.load(keys + i_f * num_heads + i_h).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    b_row_key = _mix(b_key ^ b_row.to(tl.uint64, bitcast=True))
    b_index = _mix(o_w.to(tl.uint64) ^ 0x61C8864680B583EA)  # ~0x9E3779B97F4A7C15
    b_mixed = _mix(b_word.to(tl.uint64, bitcast=True) ^ (b_row_key[:, None] + b_index[None, :]))
    b_sum = tl.sum(tl.where(mask, b_mixed, 0).to(tl.int64, bitcast=True), axis=1)

    b_group = b_row // rows_per_group - first_group
    p_out = out + (i_f * num_heads + i_h) * num_groups
    low = tl.min(tl.where(m_r, b_group, num_groups), axis=0)
    high = tl.max(tl.where(m_r, b_group, 0), axis=0)
    if low == high:
        tl.atomic_add(p_out + low, tl.sum(b_sum, axis=0))
    else:
        tl.atomic_add(p_out + b_group, b_sum, mask=m_r)


def digest_rows_triton(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    layer: int,
    units: Sequence[int],
    fields: Sequence[tuple[int, int, int]],
    rows_per_group: int,
    first_group: int,
    num_groups: int,
    not_finite: torch.Tensor,
) -> torch.Tensor:
    itemsize, num_heads = kv_cache.element_size(), kv_cache.shape[1]
    out = torch.zeros(len(fields), num_heads, num_groups, dtype=torch.int64, device=kv_cache.device)
    strides = [stride * itemsize for stride in kv_cache.stride()[:3]]
    block_ids, slots, rows = block_ids.contiguous(), slots.contiguous(), rows.contiguous()
    sizes = [num_elems * itemsize for _, _, num_elems in fields]
    for first, stop in _alike([word_bytes(size) for size in sizes]):
        word = word_bytes(sizes[first])
        offsets = [start * itemsize for _, start, _ in fields[first:stop]]
        most_words = max(sizes[first:stop]) // word
        if not (most_words and len(rows) and num_heads):
            continue
        tile_w = min(TILE_WORDS, triton.next_power_of_2(most_words))
        tile_r = min(TILE_WORDS // tile_w, triton.next_power_of_2(len(rows)))
        num_w_tiles = triton.cdiv(most_words, tile_w)
        ids = tuple(field_id for field_id, _, _ in fields[first:stop])
        mask, bit = not_finite_bits(kv_cache.dtype, word)
        keys, starts, num_words = _tables(
            layer,
            ids,
            tuple(units),
            tuple(offsets),
            tuple(size // word for size in sizes[first:stop]),
            kv_cache.device,
        )
        with launching():
            digest_kernel[(triton.cdiv(len(rows), tile_r) * num_w_tiles, num_heads, stop - first)](
                kv_cache.view(torch.int8),
                block_ids,
                slots,
                rows,
                keys,
                starts,
                num_words,
                out[first:stop],
                not_finite,
                len(rows),
                num_heads,
                rows_per_group,
                first_group,
                num_groups,
                *strides,
                MASK=mask,
                STEP=bit,
                WORD=word,
                PIECE=_piece_bytes(kv_cache, word, offsets),
                TILE_R=tile_r,
                TILE_W=tile_w,
                NUM_W_TILES=num_w_tiles,
                num_warps=4 if tile_r * tile_w >= 512 else 1,
            )
    return out


def _alike(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, stop) of the runs of equal values."""
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return list(zip(starts, [*starts[1:], len(values)], strict=True))


def _piece_bytes(kv_cache: torch.Tensor, word: int, offsets: Sequence[int]) -> int:
    """Return the widest load that reads every word of these fields, wherever it lies."""
    itemsize = kv_cache.element_size()
    # Of an axis of one, the stride is never used.
    steps = [
        stride * itemsize
        for stride, size in zip(kv_cache.stride()[:3], kv_cache.shape[:3], strict=True)
        if size > 1
    ]
    return gcd(word, kv_cache.data_ptr(), *steps, *offsets)


@functools.lru_cache(maxsize=1 << 12)
def _tables(
    layer: int,
    field_ids: tuple[int, ...],
    units: tuple[int, ...],
    starts: tuple[int, ...],
    num_words: tuple[int, ...],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """keys [F, H], first bytes [F] and words [F], int64. Cached, because copying to a device waits for it."""
    keys = torch.stack([coordinate_keys(layer, field_id, units) for field_id in field_ids])
    return keys.to(device), torch.tensor(starts, device=device), torch.tensor(num_words, device=device)
