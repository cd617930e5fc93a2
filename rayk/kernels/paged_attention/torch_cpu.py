"""Paged attention for CPUs without a C++ compiler: gather into kept memory, then torch's SDPA.

A fresh gather of tens of MiB is mapped and page-faulted at every call; a kept workspace is about twice as
fast. It is token-major ([tokens, H, C]) because then keys are a legal strided SDPA operand as they lie.
Query heads that share a KV head become rows of one attention problem, so keys are never repeated.
"""

from __future__ import annotations

import threading

import torch

from rayk.kernels.paged_attention.heads import HeadGroups, head_groups


class Workspace(threading.local):
    """Memory that outlives a call and only grows. Each thread has its own."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that is valid until the next call of this thread."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        num_bytes = num_elements * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes * 5 // 4, dtype=torch.uint8)
        return self._buffer[:num_bytes].view(dtype).view(shape)


def paged_attention_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_index: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    head_size_k: int,
    groups: HeadGroups | None = None,
    workspace: Workspace | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Arguments and result as `paged_attention`; `workspace` is kept by the caller between calls."""
    assert sinks is None, "the torch kernel has no attention sinks"
    assert soft_cap is None, "the torch kernel has no soft cap"
    groups = groups or head_groups(kv_index)
    workspace = workspace or Workspace()
    num_slots = kv_cache.shape[2]
    by_token = kv_cache.transpose(1, 2)  # [B, N, H, C]
    out = q.new_empty(q.shape[0], q.shape[1], kv_cache.shape[-1] - head_size_k)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lens):
        rows = slice(starts[r], starts[r + 1])
        num_queries = rows.stop - rows.start
        if num_queries == 0:
            continue
        oldest = seq_len - num_queries
        first = 0 if window is None else max(0, oldest - window + 1)
        first_block, end_block = first // num_slots, -(-seq_len // num_slots)
        block_ids = block_table[r, first_block:end_block]
        gathered = workspace.take((len(block_ids), *by_token.shape[1:]), kv_cache.dtype)
        torch.index_select(by_token, 0, block_ids, out=gathered)
        skipped = first_block * num_slots
        content = gathered.flatten(0, 1)[first - skipped : seq_len - skipped].to(q.dtype)
        mask = _mask(oldest - first, num_queries, len(content), window)
        out[rows] = _attend(q[rows], content, kv_index, groups, mask, scale, head_size_k)
    return out


def _mask(oldest: int, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor | None:
    """[num_queries, num_keys] True where the key is seen. Positions count from the first gathered key."""
    if num_queries == 1:
        return None  # exactly the keys it sees were gathered
    positions = torch.arange(oldest, oldest + num_queries).unsqueeze(1)
    keys = torch.arange(num_keys).unsqueeze(0)
    seen = keys <= positions
    return seen if window is None else seen & (keys > positions - window)


def _attend(
    q: torch.Tensor,
    content: torch.Tensor,
    kv_index: torch.Tensor,
    groups: HeadGroups,
    mask: torch.Tensor | None,
    scale: float,
    head_size_k: int,
) -> torch.Tensor:
    """One sequence: q [n, Q, Dk], content [keys, H, C], mask [n, keys] -> [n, Q, Dv]."""
    num_queries, size = len(q), groups.group_size
    if groups.uniform:
        order = groups.query_heads_tensor.flatten().long()
        selected = content[:, groups.kv_heads] if len(groups.kv_heads) < content.shape[1] else content
    else:
        order = torch.arange(q.shape[1])
        selected, size = content[:, kv_index], 1
    by_head = selected.transpose(0, 1).unsqueeze(0)  # [1, G, keys, C]
    # Rows of a group are (query head, token), head-major.
    rows = q[:, order].transpose(0, 1).reshape(1, -1, size * num_queries, q.shape[-1])
    attended = torch.nn.functional.scaled_dot_product_attention(
        rows,
        by_head[..., :head_size_k],
        by_head[..., head_size_k:],
        attn_mask=None if mask is None else mask.repeat(size, 1),
        scale=scale,
    )
    result = q.new_empty(num_queries, q.shape[1], attended.shape[-1])
    result[:, order] = attended.reshape(len(order), num_queries, -1).transpose(0, 1)
    return result
