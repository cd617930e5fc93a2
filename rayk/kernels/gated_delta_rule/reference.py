"""The gated delta rule written to be read: one request, one token at a time."""

from __future__ import annotations

import torch

from rayk.kernels.segments import NO_SLOT, Segments

LENGTH_EPSILON = 1e-6
"""Added to the sum of squares of a query or key under the root (qwen3_next/modeling_qwen3_next.py:363)."""


def gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    key_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
) -> torch.Tensor:
    """Compute in v's dtype, float32 at least."""
    compute_dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = (unit_length(x.to(compute_dtype))[:, key_index] for x in (q, k))
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    writes = dict(zip(segments.segment_ends_cpu, segments.write_slots.tolist(), strict=True))
    starts = segments.query_start_loc_cpu
    for r, read_slot in enumerate(segments.read_slots.tolist()):
        if read_slot == NO_SLOT:
            memory = torch.zeros(state.shape[1:], dtype=compute_dtype, device=state.device)
        else:
            memory = state[read_slot].to(compute_dtype)
        for t in range(starts[r], starts[r + 1]):
            memory = memory * g[t].to(compute_dtype).exp()[:, None, None]
            stored = (memory * k[t].unsqueeze(-1)).sum(1)  # [Hv, Dv], what the state has under this key
            change = beta[t].to(compute_dtype).unsqueeze(-1) * (v[t].to(compute_dtype) - stored)
            memory = memory + k[t].unsqueeze(-1) * change.unsqueeze(1)
            out[t] = (memory * (scale * q[t]).unsqueeze(-1)).sum(1).to(v.dtype)
            if writes.get(t + 1, NO_SLOT) != NO_SLOT:
                state[writes[t + 1]] = memory.to(state.dtype)
    return out


def unit_length(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPSILON)
