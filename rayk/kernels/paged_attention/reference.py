"""Paged attention written to be read: one sequence, one query token at a time."""

from __future__ import annotations

import torch

from rayk.kernels.quantise import QuantisedKV, head_size_v


def paged_attention_reference(
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
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Compute in q's dtype, float32 at least."""
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], head_size_v(kv_cache, head_size_k))
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lens):
        num_queries = starts[r + 1] - starts[r]
        for i in range(num_queries):
            position = seq_len - num_queries + i
            first = 0 if window is None else max(0, position - window + 1)
            tokens = torch.arange(first, position + 1, device=q.device)
            keys, values = gather(kv_cache, block_table[r], tokens, head_size_k, compute_dtype)
            keys, values = keys[kv_index], values[kv_index]  # [Q, keys, Dk], [Q, keys, Dv]
            query = q[starts[r] + i].to(compute_dtype).unsqueeze(1)  # [Q, 1, Dk]
            scores = scale * (query @ keys.mT)  # [Q, 1, keys]
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(compute_dtype).view(-1, 1, 1)], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
            out[starts[r] + i] = (weights @ values).squeeze(1).to(q.dtype)
    return out


def gather(
    kv_cache: torch.Tensor | QuantisedKV,
    blocks: torch.Tensor,
    tokens: torch.Tensor,
    head_size_k: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys [H, tokens, Dk] and values [H, tokens, Dv] of one sequence."""
    num_slots = kv_cache.shape[2]
    places = blocks[tokens // num_slots].long(), tokens % num_slots
    if isinstance(kv_cache, QuantisedKV):
        keys, values = kv_cache.gather(*places, dtype)
    else:
        content = kv_cache[places[0], :, places[1]].to(dtype)
        keys, values = content[..., :head_size_k], content[..., head_size_k:]
    return keys.transpose(0, 1), values.transpose(0, 1)
