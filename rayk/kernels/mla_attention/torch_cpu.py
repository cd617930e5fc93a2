"""Latent attention for CPUs: gather a sequence's rows into reused memory, then two matrix products.

All (token, query head) pairs are rows of one problem, since they share their keys. Tokens are taken in
pieces: large enough for efficient products, small enough to bound the scores. A quantised cache is gathered
and dequantised token by token.
"""

from __future__ import annotations

import torch

from rayk.kernels.paged_attention.torch_cpu import Workspace
from rayk.kernels.quantise import QuantisedKV

_SCORES_AT_ONCE = 1 << 22
"""Scores held at a time: 16 MiB in float32."""
_TOKENS_AT_ONCE = 64
"""Most query tokens per product, each of which also computes unused scores of later tokens."""


def mla_attention_torch(
    q: torch.Tensor,
    cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    latent_size: int,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """`workspace` is reused between calls."""
    workspace = workspace or Workspace()
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], latent_size)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lens):
        packed = slice(starts[r], starts[r + 1])
        if packed.start == packed.stop:
            continue
        rows = gather_sequence(cache, block_table[r], seq_len, workspace, compute_dtype)
        out[packed] = _attend(q[packed].to(compute_dtype), rows, scale, latent_size).to(q.dtype)
    return out


def gather_sequence(
    cache: torch.Tensor | QuantisedKV,
    blocks: torch.Tensor,
    seq_len: int,
    workspace: Workspace,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gather the rows [seq_len, R + Dr] of one sequence, possibly in the workspace."""
    if isinstance(cache, QuantisedKV):
        positions, num_slots = torch.arange(seq_len), cache.shape[2]
        places = blocks[positions // num_slots].long(), positions % num_slots
        return torch.cat(cache.gather(*places, dtype), dim=-1).squeeze(1)
    num_slots = cache.shape[1]
    block_ids = blocks[: -(-seq_len // num_slots)]
    gathered = workspace.take((len(block_ids), *cache.shape[1:]), cache.dtype)
    torch.index_select(cache, 0, block_ids, out=gathered)
    # What lies beyond the sequence in its last block is cut off here, and so never multiplied.
    return gathered.flatten(0, 1)[:seq_len].to(dtype)


def _attend(q: torch.Tensor, rows: torch.Tensor, scale: float, latent_size: int) -> torch.Tensor:
    """Attend q [n, Q, R + Dr], the last n tokens of the sequence, to its rows [keys, R + Dr]: [n, Q, R]."""
    num_queries, num_heads, _ = q.shape
    out = q.new_empty(num_queries, num_heads, latent_size)
    num_before = len(rows) - num_queries
    step = max(1, min(_TOKENS_AT_ONCE, _SCORES_AT_ONCE // (num_heads * len(rows))))
    for begin in range(0, num_queries, step):
        some = q[begin : begin + step]
        seen = rows[: num_before + begin + len(some)]
        scores = (some.flatten(0, 1) @ seen.mT).mul_(scale).view(len(some), num_heads, -1)
        if len(some) > 1:
            # Only its own tokens' keys can be hidden from a token.
            hidden = torch.ones(len(some), len(some), dtype=torch.bool).triu(1).unsqueeze(1)
            scores[..., num_before + begin :].masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out[begin : begin + step] = (weights.flatten(0, 1) @ seen[:, :latent_size]).view_as(
            out[begin : begin + step]
        )
    return out
