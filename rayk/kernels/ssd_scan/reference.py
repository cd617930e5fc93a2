"""ssd_scan written to be read: one request, one token at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.states import walks


def ssd_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    group_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Compute in x's dtype, float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    a, d, dt_bias = a.to(dtype), d.to(dtype), dt_bias.to(dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for walk in walks(segments):
        h = torch.zeros(state.shape[1:], dtype=dtype, device=x.device)  # [H, P, N]
        if walk.read_slot != NO_SLOT:
            h = state[walk.read_slot].to(dtype)
        write_slots = dict(walk.segments)
        for t in range(walk.start, walk.stop):
            x_t = x[t].to(dtype)
            b_t, c_t = (v[t, group_index].to(dtype).unsqueeze(1) for v in (b, c))  # [H, 1, N]
            dt_t = F.softplus(dt[t].to(dtype) + dt_bias)
            h = torch.exp(dt_t * a)[:, None, None] * h + (dt_t[:, None] * x_t).unsqueeze(2) * b_t
            out[t] = ((h * c_t).sum(2) + d[:, None] * x_t).to(x.dtype)
            if write_slots.get(t + 1, NO_SLOT) != NO_SLOT:
                state[write_slots[t + 1]] = h.to(state.dtype)
    return out
