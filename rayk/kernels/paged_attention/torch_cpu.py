"""Paged attention for CPUs without a C++ compiler: gather into reused memory, then torch's SDPA.

Reusing the memory makes it about twice as fast: a fresh gather of tens of MiB is page-faulted at every call.
The gather is token-major ([tokens, H, C]), which SDPA takes as strided operands. Query heads that share a KV
head become rows of one problem, so keys are never repeated. A quantised cache is gathered and dequantised
token by token. SDPA has neither sinks nor a soft cap: with either, the softmax is written out in float32.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from rayk.kernels.paged_attention.heads import HeadGroups, head_groups
from rayk.kernels.quantise import QuantisedKV, head_size_v

_SCORES_AT_ONCE = 1 << 22
"""Scores that the written-out softmax holds at a time: 16 MiB in float32."""


class Workspace(threading.local):
    """Memory that is reused between calls and only grows; one per thread."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, valid until this thread's next call."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        num_bytes = num_elements * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes * 5 // 4, dtype=torch.uint8)
        return self._buffer[:num_bytes].view(dtype).view(shape)


def paged_attention_torch(
    q: torch.Tensor,
    kv_cache: torch.Tensor | QuantisedKV,
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
    """`workspace` is reused between calls."""
    groups = groups or head_groups(kv_index)
    workspace = workspace or Workspace()
    plain = sinks is None and soft_cap is None
    compute_dtype = q.dtype if plain else torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], head_size_v(kv_cache, head_size_k))
    order = groups.query_heads_tensor.flatten().long() if groups.uniform else torch.arange(q.shape[1])
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lens):
        rows = slice(starts[r], starts[r + 1])
        num_queries = rows.stop - rows.start
        if num_queries == 0:
            continue
        oldest = seq_len - num_queries
        first = 0 if window is None else max(0, oldest - window + 1)
        content = gather_tokens(kv_cache, block_table[r], first, seq_len, workspace, compute_dtype)
        problem = fold(q[rows].to(compute_dtype), content, order, kv_index, groups, head_size_k)
        mask = _mask(oldest - first, num_queries, len(content), window)
        if plain:
            attended = _attend_sdpa(problem, mask, scale)
        else:
            ordered = None if sinks is None else sinks[order].to(compute_dtype)
            attended, _ = attend_written_out(problem, mask, scale, ordered, soft_cap)
        out[rows, order] = attended.flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out


def gather_tokens(
    kv_cache: torch.Tensor | QuantisedKV,
    blocks: torch.Tensor,
    first: int,
    end: int,
    workspace: Workspace,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Keys and values [tokens, H, C] of tokens first .. end - 1, possibly in the workspace."""
    num_slots = kv_cache.shape[2]
    if isinstance(kv_cache, QuantisedKV):
        tokens = torch.arange(first, end)
        places = blocks[tokens // num_slots].long(), tokens % num_slots
        return torch.cat(kv_cache.gather(*places, dtype), dim=-1)
    first_block, end_block = first // num_slots, -(-end // num_slots)
    by_token = kv_cache.transpose(1, 2)  # [B, N, H, C]
    gathered = workspace.take((end_block - first_block, *by_token.shape[1:]), kv_cache.dtype)
    torch.index_select(by_token, 0, blocks[first_block:end_block], out=gathered)
    skipped = first_block * num_slots
    return gathered.flatten(0, 1)[first - skipped : end - skipped].to(dtype)


def _mask(oldest: int, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor | None:
    """[num_queries, num_keys], True where the key is seen; None for one query, whose keys were all gathered.
    Positions count from the first gathered key."""
    if num_queries == 1:
        return None  # exactly the keys it sees were gathered
    positions = torch.arange(oldest, oldest + num_queries).unsqueeze(1)
    keys = torch.arange(num_keys).unsqueeze(0)
    seen = keys <= positions
    return seen if window is None else seen & (keys > positions - window)


class Problem(NamedTuple):
    """One sequence: G groups of S query heads that share keys and values, n query tokens."""

    rows: torch.Tensor
    """[G, S, n, Dk]"""
    keys: torch.Tensor
    """[G, keys, Dk]"""
    values: torch.Tensor
    """[G, keys, Dv]"""


def fold(
    q: torch.Tensor,
    content: torch.Tensor,
    order: torch.Tensor,
    kv_index: torch.Tensor,
    groups: HeadGroups,
    head_size_k: int,
) -> Problem:
    """Group q [n, Q, Dk] and content [keys, H, C]. Uneven groups become groups of one, keys repeated."""
    if groups.uniform:
        size = groups.group_size
        selected = content[:, groups.kv_heads] if len(groups.kv_heads) < content.shape[1] else content
    else:
        size, selected = 1, content[:, kv_index]
    by_head = selected.transpose(0, 1)
    rows = q[:, order].transpose(0, 1).view(-1, size, len(q), q.shape[-1])
    return Problem(rows, by_head[..., :head_size_k], by_head[..., head_size_k:])


def _attend_sdpa(problem: Problem, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Compute [G, S, n, Dv] by torch's SDPA. mask [n, keys]."""
    num_groups, size, num_queries, _ = problem.rows.shape
    attended = torch.nn.functional.scaled_dot_product_attention(
        problem.rows.flatten(1, 2).unsqueeze(0),
        problem.keys.unsqueeze(0),
        problem.values.unsqueeze(0),
        attn_mask=None if mask is None else mask.repeat(size, 1),
        scale=scale,
    )
    return attended.view(num_groups, size, num_queries, -1)


def attend_written_out(
    problem: Problem,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute [G, S, n, Dv] and the logs of the sums of exponents [G, S, n] in pieces, to bound the memory.
    mask [n, keys], sinks [G * S]. Where a query sees nothing: zeros and -inf."""
    rows, keys, values = problem.rows, problem.keys, problem.values
    num_groups, size, num_queries, _ = rows.shape
    out = rows.new_empty(*rows.shape[:3], values.shape[-1])
    lse = rows.new_empty(rows.shape[:3])
    step = max(1, _SCORES_AT_ONCE // (num_groups * size * keys.shape[1]))
    for begin in range(0, num_queries, step):
        some = rows[:, :, begin : begin + step]
        scores = (some.flatten(1, 2) @ keys.mT).view(*some.shape[:3], -1).mul_(scale)
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if mask is not None:
            scores.masked_fill_(~mask[begin : begin + step], float("-inf"))
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sink = sinks.view(num_groups, size, 1, 1)
            top = torch.maximum(top, sink)
        # Keep -inf - -inf out of the exponent.
        top.clamp_(min=torch.finfo(top.dtype).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += torch.exp(sink - top)
        weighted = (weights.flatten(1, 2) @ values).view(*some.shape[:3], -1)
        lse[:, :, begin : begin + step] = (top + total.log()).squeeze(-1)
        out[:, :, begin : begin + step] = weighted / total.masked_fill_(total == 0, 1.0)
    return out, lse
