"""Paged attention on a GPU: online softmax over tiles of keys, in two forms.

Prefill (and mixed) batches: one program per (tile of query rows, KV head). The rows of a tile are (token,
query head of the group), token-major, so that query heads which share a KV head read its keys once. A
request's tiles are found without the host knowing its length: request r owns the programs from
query_start_loc[r] // TILE_Q + r on, which is always enough of them.

Decode batches: one program per (request, KV head, split of the keys). With one split it writes the result;
with more it leaves maximum, sum and weighted values of its keys in a float32 workspace, and a second
kernel combines them. No grid depends on what is on the device, so both may be captured in a CUDA graph.

A block id outside the cache, or a column outside the block table, is never followed: the rows that see such
a key become NaN.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import triton

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.paged_attention.heads import HeadGroups
from rayk.kernels.paged_attention.tiles import Tiles, choose_num_splits, choose_tiles
from rayk.kernels.paged_attention.triton import (
    combine_splits_kernel,
    paged_attention_decode_kernel,
    paged_attention_kernel,
)
from rayk.kernels.target import current_target

SPLITS_AT_ONCE = 32
"""Splits in a tile of the combining kernel."""


def split_workspace_elements(
    num_requests: int, num_query_heads: int, head_size_v: int, num_splits: int
) -> int:
    """Float32 elements that a decode step over `num_splits` splits needs: values, maximum and sum of each."""
    return num_requests * num_query_heads * num_splits * (head_size_v + 2)


def paged_attention_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    groups: HeadGroups,
    scale: float,
    window: int | None,
    head_size_k: int,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as `paged_attention`. As many requests as tokens is a decode step, one token each.

    `num_splits` of a decode step follows from the shapes of q, block_table and the KV heads alone, unless
    given. `workspace` is a flat float32 tensor of at least `split_workspace_elements`, where the caller
    keeps one; otherwise torch's allocator provides it (in a CUDA graph, from the graph's own pool).
    `tiles` is for tests.
    """
    num_slots, stride_n = kv_cache.shape[2], kv_cache.stride(2)
    assert q.shape[-1] == head_size_k <= 256
    assert kv_cache.shape[-1] - head_size_k <= 256
    assert q.stride(-1) == kv_cache.stride(-1) == block_table.stride(-1) == 1
    assert (num_slots - 1) * stride_n < 2**31, "offsets inside a block are 32-bit"
    call = _Call(
        q,
        kv_cache,
        block_table,
        seq_lens,
        groups,
        head_size_k=head_size_k,
        scale=scale,
        window=window,
        sinks=sinks,
        soft_cap=soft_cap,
    )
    out_dtype = torch.float32 if INTERPRETED else q.dtype
    out = torch.empty(*q.shape[:2], call.head_size_v, dtype=out_dtype, device=q.device)
    if len(q) > 0:
        is_decode = len(q) == len(seq_lens)
        tiles = tiles or call.choose_tiles(decode_only=is_decode)
        with launching():
            if is_decode:
                _decode(call, out, tiles, num_splits or call.choose_num_splits(), workspace)
            else:
                _prefill(call, out, tiles, query_start_loc)
    return out.to(q.dtype)


@dataclass(frozen=True)
class _Call:
    """What both forms are told."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    groups: HeadGroups
    _: KW_ONLY
    head_size_k: int
    scale: float
    window: int | None
    sinks: torch.Tensor | None
    soft_cap: float | None

    @property
    def head_size_v(self) -> int:
        return self.kv_cache.shape[-1] - self.head_size_k

    @property
    def padded(self) -> tuple[int, int]:
        """Head sizes of keys and values as tiles hold them."""
        return tuple(max(16, triton.next_power_of_2(n)) for n in (self.head_size_k, self.head_size_v))

    def choose_tiles(self, *, decode_only: bool) -> Tiles:
        mixed = self.q.dtype != self.kv_cache.dtype
        return choose_tiles(
            current_target(),
            decode_only=decode_only,
            group_size=self.groups.group_size,
            row_elements=max(self.padded),
            itemsize=4 if mixed else self.q.element_size(),
        )

    def choose_num_splits(self) -> int:
        """From fixed maxima only: the same for every step that a CUDA graph captured."""
        most_keys = self.block_table.shape[1] * self.kv_cache.shape[2]
        return choose_num_splits(
            current_target(),
            num_programs=len(self.seq_lens) * len(self.groups.kv_heads),
            max_keys=most_keys if self.window is None else min(most_keys, self.window),
        )

    def arguments(self, tiles: Tiles) -> dict[str, Any]:
        """Of either attention kernel."""
        padded_k, padded_v = self.padded
        stride_b, stride_h, stride_n, _ = self.kv_cache.stride()
        # An option that only NVIDIA's backend knows.
        limit = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
        return {
            "q": self.q,
            "kv_cache": self.kv_cache,
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "group_kv_heads": self.groups.kv_heads_tensor,
            "group_query_heads": self.groups.query_heads_tensor,
            "sinks": self.sinks,
            "scale": float(self.scale),
            "window": self.window or 2**31 - 1,
            "soft_cap": float(self.soft_cap or 0.0),
            "num_columns": self.block_table.shape[1],
            "num_blocks": self.kv_cache.shape[0],
            "q_stride_t": self.q.stride(0),
            "q_stride_h": self.q.stride(1),
            "stride_b": stride_b,
            "stride_h": stride_h,
            "stride_n": stride_n,
            "num_query_heads": self.q.shape[1],
            "table_stride": self.block_table.stride(0),
            "NUM_SLOTS": self.kv_cache.shape[2],
            "HEAD_K": self.head_size_k,
            "HEAD_V": self.head_size_v,
            "PADDED_K": padded_k,
            "PADDED_V": padded_v,
            "GROUP": self.groups.group_size,
            "ROWS": tiles.rows,
            "TILE_KEYS": tiles.keys,
            "HAS_WINDOW": self.window is not None,
            "HAS_SINKS": self.sinks is not None,
            "HAS_CAP": self.soft_cap is not None,
            # Unlike dtypes are multiplied in float32; the interpreter has no bf16 arithmetic.
            "WIDEN": INTERPRETED or self.q.dtype != self.kv_cache.dtype,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        } | limit


def _prefill(call: _Call, out: torch.Tensor, tiles: Tiles, query_start_loc: torch.Tensor) -> None:
    num_requests = len(call.seq_lens)
    tile_q = tiles.rows // call.groups.group_size
    paged_attention_kernel[(len(out) // tile_q + num_requests, len(call.groups.kv_heads))](
        **call.arguments(tiles),
        out=out,
        query_start_loc=query_start_loc,
        num_requests=num_requests,
    )


def _decode(
    call: _Call, out: torch.Tensor, tiles: Tiles, num_splits: int, workspace: torch.Tensor | None
) -> None:
    num_requests, num_query_heads, head_size_v = out.shape
    is_split = num_splits > 1
    split_out, split_stats = out, None
    if is_split:
        num_values = num_requests * num_query_heads * num_splits * head_size_v
        needed = split_workspace_elements(num_requests, num_query_heads, head_size_v, num_splits)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.float32, device=out.device)
        split_out, split_stats = workspace[:num_values], workspace[num_values:needed]
    arguments = call.arguments(tiles)
    paged_attention_decode_kernel[(num_requests, len(call.groups.kv_heads), num_splits)](
        **arguments,
        out=split_out,
        split_stats=split_stats,
        num_splits=num_splits,
        IS_SPLIT=is_split,
    )
    if is_split:
        shared = ("seq_lens", "sinks", "window", "HEAD_V", "PADDED_V", "HAS_WINDOW", "HAS_SINKS")
        combine_splits_kernel[(num_requests, num_query_heads)](
            **{name: arguments[name] for name in shared},
            split_out=split_out,
            split_stats=split_stats,
            out=out,
            num_splits=num_splits,
            TILE_KEYS=tiles.keys,
            AT_ONCE=SPLITS_AT_ONCE,
            num_warps=4,
        )
