"""Latent attention written to be read: one sequence, one query token at a time."""

from __future__ import annotations

import torch

from rayk.kernels.quantise import QuantisedKV


def mla_attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent_size: int,
) -> torch.Tensor:
    """Compute in q's dtype, float32 at least."""
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], latent_size)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lens):
        num_queries = starts[r + 1] - starts[r]
        for i in range(num_queries):
            positions = torch.arange(seq_len - num_queries + i + 1, device=cache.device)
            rows = gather_rows(cache, block_table[r], positions, compute_dtype)
            scores = scale * (q[starts[r] + i].to(compute_dtype) @ rows.mT)  # [Q, keys]
            weights = torch.softmax(scores, dim=-1)
            out[starts[r] + i] = (weights @ rows[:, :latent_size]).to(q.dtype)
    return out


def gather_rows(
    cache: torch.Tensor | QuantisedKV, blocks: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Gather the cached rows [tokens, R + Dr] of one sequence."""
    num_slots = cache.shape[-1 if isinstance(cache, QuantisedKV) else 1]
    places = blocks[tokens // num_slots].long(), tokens % num_slots
    if isinstance(cache, QuantisedKV):
        return torch.cat(cache.gather(*places, dtype), dim=-1).squeeze(1)
    return cache[places].to(dtype)
