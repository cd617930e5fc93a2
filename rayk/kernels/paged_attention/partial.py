"""Attention to some of a sequence's keys: those that a rank holds, where ranks deal its tokens.

T tokens, Q query heads, B kernel blocks of N token slots, H KV heads. Ranks' parts are merged by
`merge_partials`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rayk.kernels.dispatch import default_impl
from rayk.kernels.paged_attention.heads import HeadGroups, head_groups
from rayk.kernels.paged_attention.reference import gather
from rayk.kernels.paged_attention.torch_cpu import Workspace, attend_written_out, fold, gather_tokens
from rayk.kernels.quantise import QuantisedKV, head_size_v

Partial = tuple[torch.Tensor, torch.Tensor]
"""What tokens attend to [T, Q, Dv], and the log of their sums of exponents [T, Q]."""


def paged_attention_partial(
    q: torch.Tensor,
    kv_cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    key_rows: torch.Tensor,
    key_starts: torch.Tensor,
    key_ends: torch.Tensor,
    kv_index: torch.Tensor,
    *,
    scale: float,
    head_size_k: int,
    soft_cap: float | None = None,
    query_start_loc: torch.Tensor | None = None,
    impl: str | None = None,
    groups: HeadGroups | None = None,
    workspace: Workspace | None = None,
) -> Partial:
    """Attend token t of q [T, Q, Dk] to rows key_starts[t] .. key_ends[t] - 1 of the sequence whose blocks
    are block_table[key_rows[t]] ([T] int32 each).

    Everything else is as in `paged_attention`, but for sinks: they are no rank's keys, so `merge_partials`
    adds them. Returns float32 (float64 for q in float64); zeros and -inf where a token sees no key.

    `query_start_loc` [R + 1] int32 says which tokens are of one request, and so of one row: the Triton form
    reads their keys together, not for each token by itself. `impl`: reference, torch or triton; None takes
    triton on CUDA, else torch.
    """
    impl = impl or default_impl(kv_cache.is_cuda)
    keys = (block_table, key_rows, key_starts, key_ends)
    if impl == "reference":
        return _reference(q, kv_cache, *keys, kv_index, scale, head_size_k, soft_cap)
    groups = groups or head_groups(kv_index)
    if impl == "triton":
        from rayk.kernels.paged_attention.launch import paged_attention_partial_triton

        return paged_attention_partial_triton(
            q,
            kv_cache,
            block_table,
            query_start_loc,
            *keys[1:],
            groups=groups,
            scale=scale,
            head_size_k=head_size_k,
            soft_cap=soft_cap,
        )
    assert impl == "torch", f"no implementation {impl!r} of partial attention"
    workspace = workspace or Workspace()
    out, lse = empty_partial(q, head_size_v(kv_cache, head_size_k))
    order = groups.query_heads_tensor.flatten().long() if groups.uniform else torch.arange(q.shape[1])
    for row, tokens, first, end in sequences(*keys[1:]):
        content = gather_tokens(kv_cache, block_table[row], first, end, workspace, out.dtype)
        problem = fold(q[tokens].to(out.dtype), content, order, kv_index, groups, head_size_k)
        mask = seen_keys(key_starts[tokens], key_ends[tokens], first, end)
        attended, sums = attend_written_out(problem, mask, scale, None, soft_cap)
        out[tokens, order] = attended.flatten(0, 1).transpose(0, 1)
        lse[tokens, order] = sums.flatten(0, 1).transpose(0, 1)
    return out, lse


def empty_partial(q: torch.Tensor, size_v: int) -> Partial:
    """Make what tokens get that see no key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape[0], q.shape[1], size_v, dtype=dtype)
    return out, q.new_full(q.shape[:2], float("-inf"), dtype=dtype)


def sequences(
    key_rows: torch.Tensor, key_starts: torch.Tensor, key_ends: torch.Tensor
) -> Iterator[tuple[int, slice, int, int]]:
    """Yield each run of tokens of one row of the block table that see some key, with the first key that one
    of them sees and the end of the last one."""
    rows, counts = torch.unique_consecutive(key_rows, return_counts=True)
    begin = 0
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        tokens = slice(begin, begin + count)
        begin += count
        seeing = key_ends[tokens] > key_starts[tokens]
        if seeing.any():
            first = int(key_starts[tokens][seeing].min())
            yield row, tokens, first, int(key_ends[tokens].max())


def seen_keys(key_starts: torch.Tensor, key_ends: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """[n, end - first], True where a token sees the key."""
    keys = torch.arange(first, end, dtype=key_ends.dtype)
    return (keys >= key_starts.unsqueeze(1)) & (keys < key_ends.unsqueeze(1))


def _reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    key_rows: torch.Tensor,
    key_starts: torch.Tensor,
    key_ends: torch.Tensor,
    kv_index: torch.Tensor,
    scale: float,
    head_size_k: int,
    soft_cap: float | None,
) -> Partial:
    """One query token at a time."""
    out, lse = empty_partial(q, head_size_v(kv_cache, head_size_k))
    ranges = zip(key_rows.tolist(), key_starts.tolist(), key_ends.tolist(), strict=True)
    for t, (row, start, end) in enumerate(ranges):
        if start >= end:
            continue
        tokens = torch.arange(start, end, device=q.device)
        keys, values = gather(kv_cache, block_table[row], tokens, head_size_k, out.dtype)
        scores = scale * (q[t].to(out.dtype).unsqueeze(1) @ keys[kv_index].mT)  # [Q, 1, keys]
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out[t] = (torch.softmax(scores, -1) @ values[kv_index]).squeeze(1)
        lse[t] = torch.logsumexp(scores, -1).squeeze(1)
    return out, lse
