"""Causal attention of a mixed prefill and decode batch over a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.kernels.paged_attention.heads import HeadGroups, head_groups
from rayk.kernels.paged_attention.native import paged_attention_native, why_no_native
from rayk.kernels.paged_attention.reference import paged_attention_reference
from rayk.kernels.paged_attention.torch_cpu import Workspace, paged_attention_torch

if TYPE_CHECKING:
    import torch

__all__ = [
    "HeadGroups",
    "Workspace",
    "head_groups",
    "paged_attention",
    "paged_attention_native",
    "paged_attention_reference",
    "paged_attention_torch",
    "why_no_native",
]


def paged_attention(
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
    impl: str | None = None,
    groups: HeadGroups | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Attend q [T, Q, Dk] to the cached keys of each token's own sequence. Returns [T, Q, Dv] in q's dtype.

    kv_cache [B, H, N, C] must hold this step's keys and values too. block_table [R, max_blocks] int32.
    The tokens of request r are q[query_start_loc[r] : query_start_loc[r + 1]] ([R + 1] int32): the last
    ones of its seq_lens[r] ([R] int32) tokens. Query head i reads KV head slot kv_index[i] ([Q] int64).
    A token at position p sees keys 0 .. p, and with a `window` only keys > p - window; what it does not
    see is never read, so it may hold anything (block 0, NaN).

    `impl`: reference, torch, native or triton; None takes triton on CUDA, else torch. `groups` is
    head_groups(kv_index), and `workspace` memory of the torch form, where the caller keeps them.
    """
    assert kv_cache.stride(-1) == 1, "the content axis must be dense"
    if impl is None:
        impl = "triton" if kv_cache.is_cuda else "torch"
    batch = (q, kv_cache, block_table, query_start_loc, seq_lens, kv_index)
    if impl == "reference":
        return paged_attention_reference(*batch, scale=scale, window=window, head_size_k=head_size_k)
    groups = groups or head_groups(kv_index)
    if impl == "torch":
        return paged_attention_torch(
            *batch,
            scale=scale,
            window=window,
            head_size_k=head_size_k,
            groups=groups,
            workspace=workspace,
        )
    if impl == "native":
        return paged_attention_native(
            q,
            kv_cache,
            block_table,
            query_start_loc,
            seq_lens,
            groups=groups,
            scale=scale,
            window=window,
            head_size_k=head_size_k,
        )
    if impl == "triton":
        from rayk.kernels.paged_attention.triton import paged_attention_triton

        return paged_attention_triton(
            q,
            kv_cache,
            block_table,
            query_start_loc,
            seq_lens,
            groups=groups,
            scale=scale,
            window=window,
            head_size_k=head_size_k,
        )
    raise AssertionError(f"unknown paged_attention implementation {impl!r}")
