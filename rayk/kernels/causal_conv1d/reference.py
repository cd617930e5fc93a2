"""causal_conv1d written to be read: one request, one token at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.states import walks


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    segments: Segments,
    *,
    activation: str | None,
) -> torch.Tensor:
    """Compute in x's dtype, float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    num_channels, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for walk in walks(segments):
        taps = x.new_zeros(num_channels, width - 1)
        if walk.read_slot != NO_SLOT:
            taps = state[walk.read_slot].reshape(num_channels, width - 1).to(x.dtype)
        write_slots = dict(walk.segments)
        for t in range(walk.start, walk.stop):
            taps = torch.cat([taps, x[t].unsqueeze(1)], dim=1)  # [C, W], the newest last
            y = (taps.to(dtype) * weight.to(dtype)).sum(1)
            if bias is not None:
                y = y + bias.to(dtype)
            out[t] = (F.silu(y) if activation == "silu" else y).to(x.dtype)
            taps = taps[:, 1:]
            if write_slots.get(t + 1, NO_SLOT) != NO_SLOT:
                state[write_slots[t + 1]] = taps.reshape(state.shape[1:]).to(state.dtype)
    return out
