"""selective_scan written to be read: one request, one token at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.states import walks


def selective_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None,
    state: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """Compute in x's dtype, float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    a, d, dt_bias = a.to(dtype), d.to(dtype), dt_bias.to(dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for walk in walks(segments):
        h = torch.zeros(a.shape, dtype=dtype, device=x.device)
        if walk.read_slot != NO_SLOT:
            h = state[walk.read_slot].reshape(a.shape).to(dtype)
        write_slots = dict(walk.segments)
        for t in range(walk.start, walk.stop):
            x_t, b_t, c_t = x[t].to(dtype), b[t].to(dtype), c[t].to(dtype)
            dt_t = F.softplus(dt[t].to(dtype) + dt_bias)
            h = torch.exp(dt_t[:, None] * a) * h + (dt_t * x_t)[:, None] * b_t
            y = h @ c_t + d * x_t
            out[t] = (y if z is None else y * F.silu(z[t].to(dtype))).to(x.dtype)
            if write_slots.get(t + 1, NO_SLOT) != NO_SLOT:
                state[write_slots[t + 1]] = h.reshape(state.shape[1:]).to(state.dtype)
    return out
