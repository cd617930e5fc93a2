"""Latent attention on a GPU: online softmax over tiles of cached rows.

All query heads share the cached rows, so a tile of queries is any run of (token, query head) pairs of one
request: request r owns the programs from query_start_loc[r] * Q // ROWS + r on, always enough of them. A
decode step splits each sequence's rows over several programs if there would be too few; paged attention's
kernel combines them. No grid depends on device data, so a CUDA graph can capture the launch.

A block id outside the cache, or a column outside the block table, is never followed: the rows that see such a
key become NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.runtime.jit import MockTensor

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.mla_attention.tiles import choose_tiles
from rayk.kernels.mla_attention.triton import mla_attention_kernel
from rayk.kernels.occupancy import programs_at_once
from rayk.kernels.paged_attention.pages import kernel_pages
from rayk.kernels.paged_attention.splits import combine_splits_kernel
from rayk.kernels.paged_attention.tiles import Tiles, choose_num_splits
from rayk.kernels.quantise import QuantisedKV
from rayk.kernels.target import current_target

MAX_LATENT, MAX_ROPE = 512, 64
"""Widest latent and rotated key that the tiles hold."""
SPLITS_AT_ONCE = 8
"""Splits per tile of the combining kernel."""


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
    """Run a decode step (one token each) if there are as many requests as tokens, else any batch.

    A decode step's `num_splits` follows from the shapes of q and block_table alone, unless given. `tiles` is
    for tests.
    """
    out_dtype = torch.float32 if INTERPRETED else q.dtype
    out = torch.empty(*q.shape[:2], latent_size, dtype=out_dtype, device=q.device)
    if len(q) > 0:
        starts = None if len(q) == len(seq_lens) else query_start_loc
        bounds = {"key_rows": None, "key_starts": None, "seq_lens": seq_lens}
        arguments = _arguments(q, cache, block_table, starts, bounds, scale, latent_size, tiles)
        _launch(arguments, out, num_splits)
    return out.to(q.dtype)


def mla_attention_partial_triton(
    q: torch.Tensor,
    cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    key_rows: torch.Tensor,
    key_starts: torch.Tensor,
    key_ends: torch.Tensor,
    *,
    scale: float,
    latent_size: int,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take tokens of one request together, given `query_start_loc`, else one by one, as in a decode step."""
    out = torch.empty(*q.shape[:2], latent_size, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if len(q) > 0:
        bounds = {"key_rows": key_rows, "key_starts": key_starts, "seq_lens": key_ends}
        arguments = _arguments(q, cache, block_table, query_start_loc, bounds, scale, latent_size, tiles)
        _launch(arguments, out, num_splits, lse)
    return out, lse


def _arguments(
    q: torch.Tensor,
    cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    bounds: Mapping[str, torch.Tensor | None],
    scale: float,
    latent_size: int,
    tiles: Tiles | None,
) -> dict[str, Any]:
    """List the arguments of both forms of the kernel: a decode step has no `query_start_loc`."""
    pages = kernel_pages(cache if isinstance(cache, QuantisedKV) else cache.unsqueeze(1))
    num_tokens, num_heads, width = q.shape
    rope_size = width - latent_size
    assert latent_size <= MAX_LATENT, latent_size
    assert rope_size <= MAX_ROPE, (q.shape, latent_size)
    assert q.stride(-1) == block_table.stride(-1) == 1
    assert scale > 0, f"a scale of {scale}"
    is_decode = query_start_loc is None
    # Quantised pages are decoded into the queries' dtype; other unlike dtypes are multiplied in float32.
    mixed = pages.scales == "none" and q.dtype != pages.keys.dtype
    tiles = tiles or choose_tiles(
        current_target(),
        num_rows=num_heads if is_decode else num_tokens * num_heads,
        itemsize=4 if mixed else q.element_size(),
        quantised=pages.scales != "none",
    )
    stride_b, _, stride_n, rope_stride_b, _, rope_stride_n = pages.strides()
    # An option that only NVIDIA's backend knows.
    limit = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
    return {
        "q": q,
        "cache": pages.keys,
        "rope_cache": pages.values,
        "scales_cache": pages.token_scales,
        "block_table": block_table,
        "query_start_loc": query_start_loc,
        **bounds,
        "scale": float(scale) * pages.k_scale * math.log2(math.e),
        "num_requests": num_tokens if query_start_loc is None else len(query_start_loc) - 1,
        "num_columns": block_table.shape[1],
        "num_blocks": pages.keys.shape[0],
        "q_stride_t": q.stride(0),
        "q_stride_h": q.stride(1),
        "stride_b": stride_b,
        "stride_n": stride_n,
        "rope_stride_b": rope_stride_b,
        "rope_stride_n": rope_stride_n,
        "row_scale": pages.k_scale,
        "table_stride": block_table.stride(0),
        "NUM_HEADS": num_heads,
        "NUM_SLOTS": pages.keys.shape[2],
        "LATENT": latent_size,
        "ROPE": rope_size,
        "PADDED_LATENT": max(16, triton.next_power_of_2(latent_size)),
        "PADDED_ROPE": max(16, triton.next_power_of_2(rope_size)),
        "ROWS": tiles.rows,
        "TILE_KEYS": tiles.keys,
        "ONE_TOKEN": is_decode,
        "IS_PARTIAL": bounds["key_starts"] is not None,
        "SCALES": pages.scales,
        "ALIGN": pages.alignment,
        "HAS_E4M3": current_target().has_e4m3 and not INTERPRETED,
        "WIDEN": INTERPRETED or mixed,  # the interpreter has no bf16 arithmetic
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    } | limit


def _launch(
    arguments: dict[str, Any], out: torch.Tensor, num_splits: int | None, lse: torch.Tensor | None = None
) -> None:
    with launching():
        if arguments["ONE_TOKEN"]:
            _decode(arguments, out, num_splits, lse)
        else:
            num_tiles = out.shape[0] * out.shape[1] // arguments["ROWS"] + arguments["num_requests"]
            mla_attention_kernel[(num_tiles, 1)](
                **arguments, out=out, lse=lse, split_stats=None, num_splits=1, IS_SPLIT=False
            )


def _decode(
    arguments: dict[str, Any], out: torch.Tensor, num_splits: int | None, lse: torch.Tensor | None
) -> None:
    num_requests, num_heads, latent_size = out.shape
    num_tiles = num_requests * triton.cdiv(num_heads, arguments["ROWS"])
    if num_splits is None:
        # From fixed maxima only: the same for every step that a CUDA graph captured.
        workspaces = dict.fromkeys(("out", "split_stats"), MockTensor(torch.float32))
        split = arguments | workspaces | {"lse": None, "num_splits": 2, "IS_SPLIT": True}
        num_splits = choose_num_splits(
            current_target(),
            num_programs=num_tiles,
            max_keys=arguments["num_columns"] * arguments["NUM_SLOTS"],
            tile_keys=arguments["TILE_KEYS"],
            programs_at_once=programs_at_once(mla_attention_kernel, split),
        )
    # The combining kernel gives the logs of sums.
    is_split = num_splits > 1 or arguments["IS_PARTIAL"]
    split_out, split_stats = out, None
    if is_split:
        shape = (num_requests, num_heads, num_splits)
        split_out = torch.empty(*shape, latent_size, dtype=torch.float32, device=out.device)
        split_stats = torch.empty(*shape, 2, dtype=torch.float32, device=out.device)
    mla_attention_kernel[(num_tiles, num_splits)](
        **arguments,
        out=split_out,
        lse=None,
        split_stats=split_stats,
        num_splits=num_splits,
        IS_SPLIT=is_split,
    )
    if is_split:
        combine_splits_kernel[(num_requests, num_heads)](
            split_out=split_out,
            split_stats=split_stats,
            out=out,
            lse=lse,
            key_starts=arguments["key_starts"],
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
            IS_PARTIAL=arguments["IS_PARTIAL"],
            num_warps=4,
        )
