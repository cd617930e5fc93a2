"""Causal attention over a paged cache of latents: multi-head latent attention in its absorbed form.

All query heads share one cached row per token, the latent (R elements) beside a rotated key (Dr): the row
is the key, its latent the value, and the heads' own projections are folded into q and out (arXiv:2405.04434).
"""

from __future__ import annotations

import torch

from rayk.kernels.dispatch import default_impl, implementation
from rayk.kernels.paged_attention import Workspace
from rayk.kernels.quantise import QuantisedKV


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

    cache [B, N, R + Dr] (any strides but a dense last axis) must hold this step's rows too; R is
    `latent_size`. A quantised cache [B, 1, N] holds latents as keys and rotated keys as values, with one
    layer scale for both; it is dequantised where it is read. block_table [R, max_blocks], query_start_loc [R
    + 1] and seq_lens [R], all int32, are as in `paged_attention`. A token at position p sees rows 0 .. p;
    other rows are never used and may hold anything (block 0, NaN).

    `impl`: reference, torch or triton; None takes triton on CUDA, else torch. `workspace` is reused by the
    torch form between calls.
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
    impl = impl or default_impl(cache.is_cuda)
    run = implementation("mla_attention", impl)
    kept = {"workspace": workspace} if impl == "torch" else {}
    return run(q, cache, block_table, query_start_loc, seq_lens, scale=scale, latent_size=latent_size, **kept)
