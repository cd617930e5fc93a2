"""Causal attention over a paged cache of latents: multi-head latent attention in its absorbed form.

All query heads share one cached row per token, the latent (R elements) beside a rotated key (Dr): the row
is the key, its latent the value, and the heads' own projections are folded into q and out (arXiv:2405.04434).
"""

from __future__ import annotations

from typing import TypedDict

import torch

from rayk.kernels.mla_attention.reference import mla_attention_reference
from rayk.kernels.mla_attention.torch_cpu import mla_attention_torch
from rayk.kernels.paged_attention import Workspace
from rayk.kernels.quantise import QuantisedKV

__all__ = ["mla_attention", "mla_attention_reference", "mla_attention_torch"]


class _Constants(TypedDict):
    """What every implementation takes."""

    scale: float
    latent_size: int


def mla_attention(
    q: torch.Tensor,
    cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent_size: int,
    impl: str | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Attend q [T, Q, R + Dr] to the cached rows of each token's sequence. Returns [T, Q, R] in q's dtype.

    cache [B, N, R + Dr] (any strides, a dense last axis) must hold this step's rows too; R is `latent_size`.
    A quantised one [B, 1, N] holds latents as its keys and rotated keys as its values, in formats with scales
    of the layer one for both; it is dequantised where it is read.
    block_table [R, max_blocks], query_start_loc [R + 1] and seq_lens [R], all int32, as `paged_attention`.
    A token at position p sees rows 0 .. p. Rows that no token of the step sees are never used: they may hold
    anything (block 0, NaN).

    `impl`: reference, torch or triton; None takes triton on CUDA, else torch. `workspace` is memory of the
    torch form, where the caller keeps it.
    """
    if isinstance(cache, QuantisedKV):
        width = cache.head_size_k + cache.head_size_v
        assert latent_size == cache.head_size_k, (latent_size, cache.head_size_k)
        assert cache.k_scale == cache.v_scale, "a latent and its key are scaled alike"
    else:
        width = cache.shape[-1]
        assert cache.stride(-1) == 1, "the content axis must be dense"
    assert q.shape[-1] == width, "queries are as wide as the cached rows"
    assert 0 < latent_size <= width, f"a latent of {latent_size} elements"
    if impl is None:
        impl = "triton" if cache.is_cuda else "torch"
    constants: _Constants = {"scale": scale, "latent_size": latent_size}
    batch = (q, cache, block_table, query_start_loc, seq_lens)
    if impl == "reference":
        return mla_attention_reference(*batch, **constants)
    if impl == "torch":
        return mla_attention_torch(*batch, workspace=workspace, **constants)
    if impl == "triton":
        from rayk.kernels.mla_attention.launch import mla_attention_triton

        return mla_attention_triton(*batch, **constants)
    raise AssertionError(f"unknown mla_attention implementation {impl!r}")
