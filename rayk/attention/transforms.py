"""Metadata of layers that see less than everything: pure functions on metadata, which compose.

 fast_prefill:   only the tokens whose logits are wanted are queries (trailing layers that share KV).
 chunked_local:  a virtual batch per request and chunk in which it has tokens; its keys begin where the chunk
                 does, so that attention within it is plain causal attention.
 sliding_window: block tables without the columns that no token of the step can see.

They apply in this order. fast_prefill after chunked_local gives the same batch, but by way of a virtual batch
for every chunk of every prompt; and after sliding_window a request's chunks no longer begin where
chunked_local looks.

All compute on the host in whole arrays, and take rows and columns of the block tables on the device. A
transform that changes nothing returns its input, so that equal views of a step are the same object.

Legend: R requests, T packed tokens, V virtual batches, N token slots of a kernel block, W columns of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from rayk.attention.metadata import CommonAttentionMetadata, TokenShardMetadata


@dataclass(frozen=True, eq=False, slots=True)
class VirtualBatches:
    """The chunks that contain a step's tokens, in packed order; int64 [V] each."""

    requests: np.ndarray
    query_lens: np.ndarray
    """Tokens of this step."""
    key_lens: np.ndarray
    """Tokens of the chunk up to the last of this step."""
    key_starts: np.ndarray
    """Position of the chunk's first token."""


def virtual_batches(query_lens: np.ndarray, seq_lens: np.ndarray, chunk: int) -> VirtualBatches:
    """Cut each request's tokens of this step [R], the last of its `seq_lens` [R], at chunk ends. Every
    request has tokens in the step."""
    computed = seq_lens - query_lens
    first = computed // chunk
    counts = (seq_lens - 1) // chunk - first + 1
    starts = np.cumsum(counts) - counts
    requests = np.repeat(np.arange(len(counts)), counts)
    key_starts = (first[requests] + np.arange(len(requests)) - starts[requests]) * chunk
    ends = np.minimum(key_starts + chunk, seq_lens[requests])
    return VirtualBatches(
        requests=requests,
        query_lens=ends - np.maximum(key_starts, computed[requests]),
        key_lens=ends - key_starts,
        key_starts=key_starts,
    )


def chunked_local(common: CommonAttentionMetadata, chunk: int) -> CommonAttentionMetadata:
    """Return the step for layers whose tokens see only their own chunk: R becomes V. N divides `chunk`."""
    size = common.block_size
    assert chunk % size == 0, f"chunks of {chunk} positions do not begin where kernel blocks of {size} do"
    if common.max_seq_len <= chunk:
        return common
    starts, seq_lens = _host(common)
    batches = virtual_batches(np.diff(starts), seq_lens, chunk)
    first_columns = batches.key_starts // size
    return _rebuilt(common, batches.requests, batches.query_lens, batches.key_lens, first_columns)


def sliding_window(common: CommonAttentionMetadata, window: int) -> CommonAttentionMetadata:
    """Return the step for layers whose tokens see `window` keys, themselves included: tables and lengths
    begin at the first kernel block that some token of the request sees."""
    if common.max_seq_len - window < common.block_size:
        return common
    starts, seq_lens = _host(common)
    query_lens = np.diff(starts)
    first_columns = np.maximum(seq_lens - query_lens + 1 - window, 0) // common.block_size
    if not first_columns.any():
        return common
    key_lens = seq_lens - first_columns * common.block_size
    return _rebuilt(common, np.arange(len(seq_lens)), query_lens, key_lens, first_columns)


def fast_prefill(common: CommonAttentionMetadata, wanted: np.ndarray) -> CommonAttentionMetadata | None:
    """Return the step for layers that compute only the packed tokens `wanted` [M], ascending: requests
    without any are left out. None if there are none.

    A request's wanted tokens must be its last ones, or causal attention would see the wrong keys. Slots are
    -1: such layers have no keys of their own to store.
    """
    if len(wanted) == common.num_tokens:
        return common
    if not len(wanted):
        return None
    starts, seq_lens = _host(common)
    counts = np.diff(np.searchsorted(wanted, starts))
    kept = np.flatnonzero(counts)
    query_lens = counts[kept]
    last_ones = np.repeat(starts[1:][kept] - np.cumsum(query_lens), query_lens) + np.arange(query_lens.sum())
    assert np.array_equal(wanted, last_ones), "tokens are wanted that are not the last of their request"
    reduced = _rebuilt(common, kept, query_lens, seq_lens[kept], np.zeros_like(kept))
    slots = torch.full((len(wanted),), -1, dtype=torch.int64, device=common.slot_mapping.device)
    return replace(reduced, slot_mapping=slots)


def token_shard_view(
    common: TokenShardMetadata, window: int | None, chunk: int | None, wanted: np.ndarray | None
) -> TokenShardMetadata | None:
    """Return the step of a rank that holds some tokens, for layers with a window or chunks, or that compute
    only the packed tokens `wanted` [M], ascending. Their slots are -1. None if none is wanted.

    Which keys a token sees is said token by token, so that one transform does for all.
    """
    seen = common
    first = np.zeros_like(common.positions_cpu)
    if window is not None:
        first = np.maximum(first, common.positions_cpu - window + 1)
    if chunk is not None:
        first = np.maximum(first, common.positions_cpu // chunk * chunk)
    if first.any():
        seen = replace(common, key_starts=torch.from_numpy(common.tokens.count(first).astype(np.int32)))
    if wanted is None or len(wanted) == common.num_tokens:
        return seen
    if not len(wanted):
        return None
    index = torch.from_numpy(wanted)
    begins = np.searchsorted(wanted, np.array(common.query_start_loc_cpu)).astype(np.int32)
    return replace(
        seen,
        query_start_loc=torch.from_numpy(begins),
        query_start_loc_cpu=tuple(begins.tolist()),
        slot_mapping=torch.full((len(wanted),), -1, dtype=torch.int64),
        num_tokens=len(wanted),
        max_query_len=int(np.diff(begins).max()),
        key_rows=seen.key_rows[index],
        key_starts=seen.key_starts[index],
        key_ends=seen.key_ends[index],
        positions_cpu=common.positions_cpu[wanted],
    )


def _host(common: CommonAttentionMetadata) -> tuple[np.ndarray, np.ndarray]:
    """Copy query_start_loc [R + 1] and seq_lens [R] to the host, as int64."""
    return np.array(common.query_start_loc_cpu), np.array(common.seq_lens_cpu)


def _rebuilt(
    common: CommonAttentionMetadata,
    requests: np.ndarray,
    query_lens: np.ndarray,
    key_lens: np.ndarray,
    first_columns: np.ndarray,
) -> CommonAttentionMetadata:
    """Build metadata with a row per entry of these arrays [V]: tokens of one of `requests`, whose keys begin
    at a column of its block table."""
    device = common.block_table.device
    starts = np.zeros(len(requests) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=starts[1:])
    longest = int(key_lens.max())
    return replace(
        common,
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(key_lens.astype(np.int32)).to(device),
        block_table=_cut_table(common.block_table, requests, first_columns, -(-longest // common.block_size)),
        query_start_loc_cpu=tuple(starts.tolist()),
        seq_lens_cpu=tuple(key_lens.tolist()),
        num_tokens=int(starts[-1]),
        max_query_len=int(query_lens.max()),
        max_seq_len=longest,
    )


def _cut_table(
    table: torch.Tensor, requests: np.ndarray, first_columns: np.ndarray, width: int
) -> torch.Tensor:
    """Cut [V, width] from table [R, W]: of each of `requests` [V] the columns from its first one [V] on."""
    if not first_columns.any():
        return table[:, :width].index_select(0, torch.from_numpy(requests).to(table.device))
    rows, first = torch.from_numpy(np.stack((requests, first_columns))).to(table.device).unsqueeze(-1)
    columns = first + torch.arange(width, device=table.device)
    # Columns beyond a row's keys may exceed the table; nothing reads them.
    columns.clamp_(max=table.shape[1] - 1).add_(rows * table.shape[1])
    return table.reshape(-1).index_select(0, columns.view(-1)).view(-1, width)
