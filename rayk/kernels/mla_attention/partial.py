"""Latent attention to some of a sequence's rows: those that a rank holds, where ranks deal its tokens."""

from __future__ import annotations

import torch

from rayk.kernels.dispatch import default_impl
from rayk.kernels.mla_attention.reference import gather_rows
from rayk.kernels.mla_attention.torch_cpu import gather_sequence
from rayk.kernels.paged_attention import Workspace
from rayk.kernels.paged_attention.partial import Partial, empty_partial, seen_keys, sequences
from rayk.kernels.paged_attention.torch_cpu import Problem, attend_written_out
from rayk.kernels.quantise import QuantisedKV


def mla_attention_partial(
    q: torch.Tensor,
    cache: torch.Tensor | QuantisedKV,
    block_table: torch.Tensor,
    key_rows: torch.Tensor,
    key_starts: torch.Tensor,
    key_ends: torch.Tensor,
    *,
    scale: float,
    latent_size: int,
    query_start_loc: torch.Tensor | None = None,
    impl: str | None = None,
    workspace: Workspace | None = None,
) -> Partial:
    """Attend token t of q [T, Q, R + Dr] to cached rows key_starts[t] .. key_ends[t] - 1 of the sequence
    whose blocks are block_table[key_rows[t]] ([T] int32 each).

    Everything else is as in `mla_attention`. Returns [T, Q, R] and the logs of the sums of exponents [T, Q],
    as `paged_attention_partial` does, which explains `query_start_loc` too. `impl`: reference, torch or
    triton; None takes triton on CUDA, else torch.
    """
    impl = impl or default_impl(cache.is_cuda)
    if impl == "triton":
        from rayk.kernels.mla_attention.launch import mla_attention_partial_triton

        keys = (key_rows, key_starts, key_ends)
        return mla_attention_partial_triton(
            q, cache, block_table, query_start_loc, *keys, scale=scale, latent_size=latent_size
        )
    out, lse = empty_partial(q, latent_size)
    if impl == "reference":
        ranges = zip(key_rows.tolist(), key_starts.tolist(), key_ends.tolist(), strict=True)
        for t, (row, start, end) in enumerate(ranges):
            if start < end:
                positions = torch.arange(start, end, device=q.device)
                rows = gather_rows(cache, block_table[row], positions, out.dtype)
                scores = scale * (q[t].to(out.dtype) @ rows.mT)  # [Q, keys]
                out[t] = torch.softmax(scores, -1) @ rows[:, :latent_size]
                lse[t] = torch.logsumexp(scores, -1)
        return out, lse
    assert impl == "torch", f"no implementation {impl!r} of partial latent attention"
    workspace = workspace or Workspace()
    for row, tokens, first, end in sequences(key_rows, key_starts, key_ends):
        rows = gather_sequence(cache, block_table[row], end, workspace, out.dtype)[first:]
        by_head = q[tokens].to(out.dtype).transpose(0, 1)
        # All query heads are one group: they share their keys.
        problem = Problem(by_head.unsqueeze(0), rows.unsqueeze(0), rows[None, :, :latent_size])
        mask = seen_keys(key_starts[tokens], key_ends[tokens], first, end)
        attended, sums = attend_written_out(problem, mask, scale, None, None)
        out[tokens] = attended[0].transpose(0, 1)
        lse[tokens] = sums[0].transpose(0, 1)
    return out, lse
