"""Latent attention on a GPU: online softmax over tiles of cached rows.

All query heads share the cached rows, so a tile of queries is any run of (token, query head) pairs of one
request: request r owns the programs from query_start_loc[r] * Q // ROWS + r on, which is always enough of
them. A decode step splits each sequence's rows over several programs where there would be too few; the
combining kernel is the one of paged attention. No grid depends on what is on the device, so that a CUDA
graph can hold the launch.

A block id outside the cache, or a column outside the block table, is never followed: the rows that see such
a key become NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.mla_attention.tiles import choose_tiles
from rayk.kernels.mla_attention.triton import mla_attention_kernel
from rayk.kernels.paged_attention.splits import combine_splits_kernel
from rayk.kernels.paged_attention.tiles import Tiles, choose_num_splits
from rayk.kernels.quantise import QuantisedKV
from rayk.kernels.target import current_target

MAX_LATENT, MAX_ROPE = 512, 64
"""Widest latent and rotated key that the tiles have room for."""
SPLITS_AT_ONCE = 8
"""Splits in a tile of the combining kernel."""


def mla_attention_triton(
    q: torch.Tensor,
    cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent_size: int,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Arguments and result as `mla_attention`. As many requests as tokens is a decode step, one token each.

    `num_splits` of a decode step follows from the shapes of q and block_table alone, unless given. `tiles`
    is for tests.
    """
    pages = _pages(cache)
    assert latent_size <= MAX_LATENT, latent_size
    assert q.shape[-1] - latent_size <= MAX_ROPE, (q.shape, latent_size)
    assert q.stride(-1) == block_table.stride(-1) == 1
    num_tokens, num_heads, _ = q.shape
    out_dtype = torch.float32 if INTERPRETED else q.dtype
    out = torch.empty(num_tokens, num_heads, latent_size, dtype=out_dtype, device=q.device)
    if num_tokens == 0:
        return out.to(q.dtype)
    is_decode = num_tokens == len(seq_lens)
    # Quantised pages are decoded into the queries' dtype; other unlike dtypes are multiplied in float32.
    mixed = pages.scales == "none" and q.dtype != pages.rows.dtype
    tiles = tiles or choose_tiles(
        current_target(),
        decode_only=is_decode,
        num_rows=num_heads if is_decode else num_tokens * num_heads,
        itemsize=4 if mixed else q.element_size(),
        scales=pages.scales,
    )
    batch = (block_table, query_start_loc, seq_lens)
    arguments = _arguments(q, pages, *batch, tiles, latent_size) | {
        "scale": float(scale) * pages.row_scale,
        "ONE_TOKEN": is_decode,
        "WIDEN": INTERPRETED or mixed,  # the interpreter has no bf16 arithmetic
    }
    with launching():
        if is_decode:
            _decode(arguments, out, num_splits)
        else:
            num_tiles = num_tokens * num_heads // tiles.rows + len(seq_lens)
            mla_attention_kernel[(num_tiles, 1)](
                **arguments, out=out, split_stats=None, num_splits=1, IS_SPLIT=False
            )
    return out.to(q.dtype)


@dataclass(frozen=True)
class _Pages:
    """A cache as the kernel takes it (see mla_attention_kernel)."""

    rows: torch.Tensor
    """[B, N, ...]: latents, then rotated keys unless they lie elsewhere. Bytes, of a quantised cache."""
    ropes: torch.Tensor | None = None
    token_scales: torch.Tensor | None = None
    scales: str = "none"
    row_scale: float = 1.0

    def __post_init__(self) -> None:
        for view in (self.rows, self.ropes):
            if view is not None:
                assert view.stride(-1) == 1, "the content axis must be dense"
                assert (view.shape[1] - 1) * view.stride(1) < 2**31, "offsets inside a block are 32-bit"
        if self.token_scales is not None:
            assert all(s % 4 == 0 for s in self.rows.stride()[:2]), "rows are whole float32s"


def _pages(cache: torch.Tensor | QuantisedKV) -> _Pages:
    if not isinstance(cache, QuantisedKV):
        return _Pages(cache)
    (rows, scales), (ropes, _) = cache.raw(cache.k), cache.raw(cache.v)
    kind = cache.kv_format.scales
    return _Pages(
        rows[:, 0],
        ropes[:, 0] if kind == "block" else None,
        scales[:, 0] if kind == "token_head" and scales is not None else None,
        kind,
        cache.k_scale,
    )


def _arguments(
    q: torch.Tensor,
    pages: _Pages,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: Tiles,
    latent_size: int,
) -> dict[str, Any]:
    """What the kernel takes in either form."""
    cache, rope_size = pages.rows, q.shape[-1] - latent_size
    rope_strides = (0, 0) if pages.ropes is None else pages.ropes.stride()[:2]
    # An option that only NVIDIA's backend knows.
    limit = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    return {
        "q": q,
        "cache": cache,
        "rope_cache": pages.ropes,
        "scales_cache": pages.token_scales,
        "block_table": block_table,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "num_requests": len(seq_lens),
        "num_columns": block_table.shape[1],
        "num_blocks": cache.shape[0],
        "q_stride_t": q.stride(0),
        "q_stride_h": q.stride(1),
        "stride_b": cache.stride(0),
        "stride_n": cache.stride(1),
        "rope_stride_b": rope_strides[0],
        "rope_stride_n": rope_strides[1],
        "row_scale": pages.row_scale,
        "table_stride": block_table.stride(0),
        "NUM_HEADS": q.shape[1],
        "NUM_SLOTS": cache.shape[1],
        "LATENT": latent_size,
        "ROPE": rope_size,
        "PADDED_LATENT": max(16, triton.next_power_of_2(latent_size)),
        "PADDED_ROPE": max(16, triton.next_power_of_2(rope_size)),
        "ROWS": tiles.rows,
        "TILE_KEYS": tiles.keys,
        "SCALES": pages.scales,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    } | limit


def _decode(arguments: dict[str, Any], out: torch.Tensor, num_splits: int | None) -> None:
    num_requests, num_heads, latent_size = out.shape
    num_tiles = num_requests * triton.cdiv(num_heads, arguments["ROWS"])
    if num_splits is None:
        # From fixed maxima only: the same for every step that a CUDA graph captured.
        most_keys = arguments["num_columns"] * arguments["NUM_SLOTS"]
        num_splits = choose_num_splits(current_target(), num_programs=num_tiles, max_keys=most_keys)
    split_out, split_stats = out, None
    if num_splits > 1:
        shape = (num_requests, num_heads, num_splits)
        split_out = torch.empty(*shape, latent_size, dtype=torch.float32, device=out.device)
        split_stats = torch.empty(*shape, 2, dtype=torch.float32, device=out.device)
    mla_attention_kernel[(num_tiles, num_splits)](
        **arguments, out=split_out, split_stats=split_stats, num_splits=num_splits, IS_SPLIT=num_splits > 1
    )
    if num_splits > 1:
        combine_splits_kernel[(num_requests, num_heads)](
            split_out=split_out,
            split_stats=split_stats,
            out=out,
            seq_lens=arguments["seq_lens"],
            sinks=None,
            window=2**31 - 1,
            num_splits=num_splits,
            HEAD_V=latent_size,
            PADDED_V=arguments["PADDED_LATENT"],
            TILE_KEYS=arguments["TILE_KEYS"],
            AT_ONCE=SPLITS_AT_ONCE,
            HAS_WINDOW=False,
            HAS_SINKS=False,
            num_warps=4,
        )
