"""Paged attention on a GPU: online softmax over tiles of keys, in two forms.

Prefill (and mixed) batches: one program per (tile of query rows, KV head). The rows of a tile are (token,
query head of the group), token-major, so that query heads sharing a KV head read its keys once. A request's
tiles are found without the host knowing its length: request r owns the programs from query_start_loc[r] //
TILE_Q + r on, always enough of them.

Decode batches: one program per (request, KV head, split of the keys). With one split it writes the result;
with more it leaves maximum, sum and weighted values in a float32 workspace, and a second kernel combines
them. No grid depends on device data, so a CUDA graph can capture both.

A block id outside the cache, or a column outside the block table, is never followed: the rows that see such a
key become NaN.

Parts of attention (`paged_attention_partial`) come from the same kernels: each token has bounds of its keys,
and logs of sums of exponents are returned too.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import triton
from triton.runtime.jit import MockTensor

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.occupancy import programs_at_once
from rayk.kernels.paged_attention.heads import HeadGroups
from rayk.kernels.paged_attention.pages import KernelPages, kernel_pages
from rayk.kernels.paged_attention.splits import combine_splits_kernel
from rayk.kernels.paged_attention.tiles import Tiles, choose_num_splits, choose_tiles
from rayk.kernels.paged_attention.triton import paged_attention_decode_kernel, paged_attention_kernel
from rayk.kernels.quantise import QuantisedKV, head_size_v
from rayk.kernels.target import current_target

SPLITS_AT_ONCE = 32
"""Splits per tile of the combining kernel."""


def split_workspace_elements(
    num_requests: int, num_query_heads: int, head_size_v: int, num_splits: int
) -> int:
    """Count the float32 elements of a decode step's workspace: values, maximum and sum of each split."""
    return num_requests * num_query_heads * num_splits * (head_size_v + 2)


def paged_attention_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor | QuantisedKV,
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
    """Run a decode step (one token each) if there are as many requests as tokens, else any batch.

    A decode step's `num_splits` follows from the shapes of q, block_table and the KV heads alone, unless
    given. `workspace` is a flat float32 tensor of at least `split_workspace_elements`; None takes one from
    torch's allocator (in a CUDA graph, from the graph's own pool). `tiles` is for tests.
    """
    call = _KernelInputs(
        q,
        kernel_pages(kv_cache),
        block_table,
        seq_lens,
        groups,
        head_sizes=(head_size_k, head_size_v(kv_cache, head_size_k)),
        scale=scale,
        window=window,
        sinks=sinks,
        soft_cap=soft_cap,
    )
    out_dtype = torch.float32 if INTERPRETED else q.dtype
    out = torch.empty(*q.shape[:2], call.head_sizes[1], dtype=out_dtype, device=q.device)
    if len(q) > 0:
        is_decode = len(q) == len(seq_lens)
        tiles = tiles or call.choose_tiles(decode_only=is_decode)
        with launching():
            if is_decode:
                _decode(call, out, tiles, num_splits, workspace)
            else:
                _prefill(call, out, tiles, query_start_loc)
    return out.to(q.dtype)


def paged_attention_partial_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    key_rows: torch.Tensor,
    key_starts: torch.Tensor,
    key_ends: torch.Tensor,
    *,
    groups: HeadGroups,
    scale: float,
    head_size_k: int,
    soft_cap: float | None = None,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take tokens of one request together, given `query_start_loc`, else one by one, as in a decode step."""
    call = _KernelInputs(
        q,
        kernel_pages(kv_cache),
        block_table,
        key_ends,
        groups,
        head_sizes=(head_size_k, head_size_v(kv_cache, head_size_k)),
        scale=scale,
        window=None,
        sinks=None,
        soft_cap=soft_cap,
        key_rows=key_rows,
        key_starts=key_starts,
    )
    out = torch.empty(*q.shape[:2], call.head_sizes[1], dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if len(q) > 0:
        tiles = tiles or call.choose_tiles(decode_only=query_start_loc is None)
        with launching():
            if query_start_loc is None:
                _decode(call, out, tiles, num_splits, None, lse)
            else:
                _prefill(call, out, tiles, query_start_loc, lse)
    return out, lse


@dataclass(frozen=True)
class _KernelInputs:
    """Inputs of both forms."""

    q: torch.Tensor
    pages: KernelPages
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    """[R]; of partial attention, the end of each token's keys [T]."""
    groups: HeadGroups
    _: KW_ONLY
    head_sizes: tuple[int, int]
    """Head sizes of keys and of values."""
    scale: float
    window: int | None
    sinks: torch.Tensor | None
    soft_cap: float | None
    key_rows: torch.Tensor | None = None
    """[T], of partial attention."""
    key_starts: torch.Tensor | None = None
    """[T], of partial attention."""

    def __post_init__(self) -> None:
        assert self.q.shape[-1] == self.head_sizes[0] <= 256
        assert self.head_sizes[1] <= 256
        assert self.q.stride(-1) == self.block_table.stride(-1) == 1
        assert self.scale > 0, f"a scale of {self.scale}"

    @property
    def is_partial(self) -> bool:
        return self.key_starts is not None

    @property
    def padded(self) -> tuple[int, int]:
        """Head sizes of keys and values, padded to tiles."""
        size_k, size_v = (max(16, triton.next_power_of_2(n)) for n in self.head_sizes)
        return size_k, size_v

    @property
    def is_mixed(self) -> bool:
        """Whether plain pages hold another dtype than the queries, so that everything is multiplied in
        float32. Quantised pages are decoded into the queries' dtype."""
        return self.pages.scales == "none" and self.q.dtype != self.pages.keys.dtype

    @property
    def is_plain(self) -> bool:
        """Whether nothing is masked or added but what a sequence's end and its causality ask for."""
        num_slots, group = self.pages.keys.shape[2], self.groups.group_size
        is_even = self.head_sizes == self.padded and num_slots >= 16
        is_even = is_even and all(n == triton.next_power_of_2(n) for n in (num_slots, group))
        limits = (self.window, self.sinks, self.soft_cap, self.key_starts)
        return is_even and all(limit is None for limit in limits)

    def choose_tiles(self, *, decode_only: bool) -> Tiles:
        return choose_tiles(
            current_target(),
            decode_only=decode_only,
            group_size=self.groups.group_size,
            row_elements=max(self.padded),
            itemsize=4 if self.is_mixed else self.q.element_size(),
            quantised=self.pages.scales != "none",
            is_plain=self.is_plain,
            is_partial=self.is_partial,
        )

    def choose_num_splits(self, tiles: Tiles, programs_at_once: int) -> int:
        """Depends on fixed maxima only, so that every step of a captured CUDA graph has the same."""
        most_keys = self.block_table.shape[1] * self.pages.keys.shape[2]
        return choose_num_splits(
            current_target(),
            num_programs=len(self.seq_lens) * len(self.groups.kv_heads),
            max_keys=most_keys if self.window is None else min(most_keys, self.window),
            tile_keys=tiles.keys,
            programs_at_once=programs_at_once,
        )

    def arguments(self, tiles: Tiles) -> dict[str, Any]:
        """List the arguments that both attention kernels take."""
        padded_k, padded_v = self.padded
        pages = self.pages
        stride_b, stride_h, stride_n, *values_strides = pages.strides()
        scale = float(self.scale) * pages.k_scale
        # Scores in powers of two; a cap is put on before.
        exponent_scale = (self.soft_cap or scale) * math.log2(math.e)
        # An option that only NVIDIA's backend knows.
        limit = {} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}
        return {
            "q": self.q,
            "kv_cache": pages.keys,
            "values_cache": pages.values,
            "scales_cache": pages.token_scales,
            "block_table": self.block_table,
            "key_rows": self.key_rows,
            "key_starts": self.key_starts,
            "seq_lens": self.seq_lens,
            "group_kv_heads": self.groups.kv_heads_tensor,
            "group_query_heads": self.groups.query_heads_tensor,
            "sinks": self.sinks,
            "scale": exponent_scale,
            "cap_scale": scale / self.soft_cap if self.soft_cap else 0.0,
            "v_scale": pages.v_scale,
            "window": self.window or 2**31 - 1,
            "num_columns": self.block_table.shape[1],
            "num_blocks": pages.keys.shape[0],
            "q_stride_t": self.q.stride(0),
            "q_stride_h": self.q.stride(1),
            "stride_b": stride_b,
            "stride_h": stride_h,
            "stride_n": stride_n,
            "values_stride_b": values_strides[0],
            "values_stride_h": values_strides[1],
            "values_stride_n": values_strides[2],
            "num_query_heads": self.q.shape[1],
            "table_stride": self.block_table.stride(0),
            "NUM_SLOTS": pages.keys.shape[2],
            "HEAD_K": self.head_sizes[0],
            "HEAD_V": self.head_sizes[1],
            "PADDED_K": padded_k,
            "PADDED_V": padded_v,
            "GROUP": self.groups.group_size,
            "ROWS": tiles.rows,
            "TILE_KEYS": tiles.keys,
            "HAS_WINDOW": self.window is not None,
            "HAS_SINKS": self.sinks is not None,
            "HAS_CAP": self.soft_cap is not None,
            # Unlike dtypes are multiplied in float32; the interpreter has no bf16 arithmetic.
            "SCALES": pages.scales,
            "ALIGN": pages.alignment,
            "ALIGN_BYTES": pages.alignment * pages.keys.element_size(),
            "HAS_E4M3": current_target().has_e4m3 and not INTERPRETED,
            "IS_PARTIAL": self.is_partial,
            "WIDEN": INTERPRETED or self.is_mixed,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        } | limit


def _prefill(
    call: _KernelInputs,
    out: torch.Tensor,
    tiles: Tiles,
    query_start_loc: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    num_requests = len(query_start_loc) - 1
    tile_q = tiles.rows // call.groups.group_size
    num_groups = len(call.groups.kv_heads)
    paged_attention_kernel[((len(out) // tile_q + num_requests) * num_groups,)](
        **call.arguments(tiles),
        num_groups=num_groups,
        out=out,
        lse=lse,
        query_start_loc=query_start_loc,
        num_requests=num_requests,
    )


def _decode(
    call: _KernelInputs,
    out: torch.Tensor,
    tiles: Tiles,
    num_splits: int | None,
    workspace: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> None:
    num_requests, num_query_heads, head_size_v = out.shape
    arguments = call.arguments(tiles)
    if num_splits is None:
        workspaces = dict.fromkeys(("out", "split_stats"), MockTensor(torch.float32))
        split = arguments | workspaces | {"num_splits": 2, "IS_SPLIT": True}
        at_once = programs_at_once(paged_attention_decode_kernel, split)
        num_splits = call.choose_num_splits(tiles, at_once)
    # The combining kernel gives the logs of sums.
    is_split = num_splits > 1 or call.is_partial
    split_out, split_stats = out, None
    if is_split:
        num_values = num_requests * num_query_heads * num_splits * head_size_v
        needed = split_workspace_elements(num_requests, num_query_heads, head_size_v, num_splits)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.float32, device=out.device)
        split_out, split_stats = workspace[:num_values], workspace[num_values:needed]
    paged_attention_decode_kernel[(num_requests, len(call.groups.kv_heads), num_splits)](
        **arguments,
        out=split_out,
        split_stats=split_stats,
        num_splits=num_splits,
        IS_SPLIT=is_split,
    )
    if is_split:
        names = "key_starts seq_lens sinks window HEAD_V PADDED_V HAS_WINDOW HAS_SINKS IS_PARTIAL"
        shared = names.split()
        combine_splits_kernel[(num_requests, num_query_heads)](
            **{name: arguments[name] for name in shared},
            split_out=split_out,
            split_stats=split_stats,
            out=out,
            lse=lse,
            num_splits=num_splits,
            TILE_KEYS=tiles.keys,
            AT_ONCE=SPLITS_AT_ONCE,
            num_warps=4,
        )
