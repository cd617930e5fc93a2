"""copy_runs on a GPU: a program moves a tile of runs x words, in the widest words that all runs allow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayk.kernels.copy_runs.table import ALIGNMENTS, RunTable, tile_width
from rayk.kernels.interpreter import launching

TILE_WORDS = 1024
"""Words per program: 64 bytes a thread with 4 warps and words of 8 bytes."""
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=("num_runs", "num_blocks"))
def copy_runs_kernel(
    source,
    destination,
    rows,
    blocks,
    num_runs,
    num_blocks,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_W: tl.constexpr,
):
    """Grid: (tiles of (block, run) pairs, runs fastest; tiles of the longest run's words)."""
    o_pair = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    m_pair = o_pair < num_blocks.to(tl.int64) * num_runs
    o_run, o_block = o_pair % num_runs, o_pair // num_runs
    here = tl.load(blocks + o_block, mask=m_pair, other=0)
    there = tl.load(blocks + num_blocks + o_block, mask=m_pair, other=0)
    start = tl.load(rows + o_run, mask=m_pair, other=0)
    to = tl.load(rows + num_runs + o_run, mask=m_pair, other=0)
    length = tl.load(rows + 2 * num_runs + o_run, mask=m_pair, other=0)
    start += here * tl.load(rows + 3 * num_runs + o_run, mask=m_pair, other=0)
    to += there * tl.load(rows + 4 * num_runs + o_run, mask=m_pair, other=0)
    # Nobody but the table knows what divides these: without it every word would go alone.
    start = tl.multiple_of(start // WORD_BYTES, ALIGNMENT // WORD_BYTES)
    to = tl.multiple_of(to // WORD_BYTES, ALIGNMENT // WORD_BYTES)
    num_words = tl.multiple_of(length // WORD_BYTES, ALIGNMENT // WORD_BYTES)
    o_word = tl.program_id(1) * TILE_W + tl.arange(0, TILE_W)
    m = o_word[None, :] < num_words[:, None]
    p_source = source.to(tl.pointer_type(WORD)) + start[:, None] + o_word[None, :]
    p_destination = destination.to(tl.pointer_type(WORD)) + to[:, None] + o_word[None, :]
    tl.store(p_destination, tl.load(p_source, mask=m), mask=m)


def copy_runs_triton(
    source: torch.Tensor, destination: torch.Tensor, runs: RunTable, blocks: torch.Tensor
) -> None:
    """`blocks` is int64 [2, n]: source's, destination's."""
    bases = source.data_ptr() | destination.data_ptr()
    alignment = next(a for a in ALIGNMENTS if a <= runs.alignment and bases % a == 0)
    word_bytes = min(alignment, 8)
    longest = triton.cdiv(runs.max_length, word_bytes)
    tile_w = tile_width(longest)
    tile_r = TILE_WORDS // tile_w
    grid = (triton.cdiv(blocks.shape[1] * runs.num_runs, tile_r), triton.cdiv(longest, tile_w))
    with launching():
        copy_runs_kernel[grid](
            source,
            destination,
            runs.rows,
            blocks,
            runs.num_runs,
            blocks.shape[1],
            WORD=_WORDS[word_bytes],
            WORD_BYTES=word_bytes,
            ALIGNMENT=alignment,
            TILE_R=tile_r,
            TILE_W=tile_w,
            num_warps=4,
        )
