"""Causal attention of a mixed prefill and decode batch over a paged KV cache."""

from __future__ import annotations

from typing import TypedDict

import torch

from rayk.kernels.paged_attention.heads import HeadGroups, head_groups
from rayk.kernels.paged_attention.native import paged_attention_native, why_no_native
from rayk.kernels.paged_attention.reference import paged_attention_reference
from rayk.kernels.paged_attention.torch_cpu import Workspace, paged_attention_torch
from rayk.kernels.quantise import QuantisedKV

__all__ = ["HeadGroups", "Workspace", "head_groups", "paged_attention", "why_no_native"]


class _Constants(TypedDict):
    """Arguments that stay the same between the steps of a layer."""

    scale: float
    window: int | None
    head_size_k: int
    sinks: torch.Tensor | None
    soft_cap: float | None


def paged_attention(
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
    impl: str | None = None,
    groups: HeadGroups | None = None,
    workspace: Workspace | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend q [T, Q, Dk] to the cached keys of each token's own sequence. Returns [T, Q, Dv] in q's dtype.

    kv_cache [B, H, N, C] must hold this step's keys and values too; a quantised one is dequantised where it
    is read. block_table [R, max_blocks] int32. The tokens of request r are q[query_start_loc[r] :
    query_start_loc[r + 1]] ([R + 1] int32), the last of its seq_lens[r] ([R] int32) tokens. Query head i
    reads KV head slot kv_index[i] ([Q] int64). A token at position p sees keys 0 .. p, and with a `window`
    only keys > p - window; others are never read and may hold anything (block 0, NaN).

    The score of a key is scale * q . k; `soft_cap` c > 0 turns it into c * tanh(score / c). `sinks` ([Q]
    float32) adds exp(sinks[i]) to the softmax denominator of query head i, neither scaled nor capped, like
    one more key with a value of zeros (gpt-oss, arXiv:2309.17453); -inf adds nothing.

    `impl`: reference, torch, native or triton; None takes triton on CUDA, else torch. `groups` is
    head_groups(kv_index), if the caller keeps it; `workspace` is reused by the torch form between calls.
    """
    if isinstance(kv_cache, QuantisedKV):
        assert head_size_k == kv_cache.head_size_k, (head_size_k, kv_cache.head_size_k)
    else:
        assert kv_cache.stride(-1) == 1, "the content axis must be dense"
    if sinks is not None:
        assert sinks.shape == kv_index.shape, "not one of the sinks per query head"
        assert sinks.dtype == torch.float32, f"sinks are {sinks.dtype}, not float32"
    assert soft_cap is None or soft_cap > 0, f"a soft cap of {soft_cap}"
    if impl is None:
        impl = "triton" if kv_cache.is_cuda else "torch"
    constants: _Constants = {
        "scale": scale,
        "window": window,
        "head_size_k": head_size_k,
        "sinks": sinks,
        "soft_cap": soft_cap,
    }
    batch = (q, kv_cache, block_table, query_start_loc, seq_lens)
    if impl == "reference":
        return paged_attention_reference(*batch, kv_index, **constants)
    groups = groups or head_groups(kv_index)
    if impl == "torch":
        return paged_attention_torch(*batch, kv_index, groups=groups, workspace=workspace, **constants)
    if impl == "native":
        return paged_attention_native(*batch, groups=groups, **constants)
    if impl == "triton":
        from rayk.kernels.paged_attention.launch import paged_attention_triton

        return paged_attention_triton(*batch, groups=groups, **constants)
    raise AssertionError(f"unknown paged_attention implementation {impl!r}")
