"""selective_scan on a CPU: one multiply-add per token over all channels, on tiles that stay in cache."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.states import Tokens, read_states, split_stepwise

TILE_ELEMENTS = 1 << 17
"""Elements of [tokens, C, N] in float32: a tile's decays and states, half a MiB each, fit a core's cache."""


def selective_scan_torch(
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
    x_f = x.float()
    dt = F.softplus(dt.float() + dt_bias)
    dt_x, b, c = dt * x_f, b.float(), c.float()
    y = torch.empty_like(dt)
    stepwise, walks = split_stepwise(segments)
    if stepwise is not None:
        stepwise.run(state, partial(_step, y, dt, dt_x, a, b, c))
    tile = max(1, TILE_ELEMENTS // a.numel())
    for walk in walks:
        h = read_states(state, torch.tensor([walk.read_slot])).reshape(a.shape)
        for start, stop, slot in walk.chunks(tile):
            tokens = slice(start, stop)
            h = _scan(y[tokens], dt[tokens], dt_x[tokens], a, b[tokens], c[tokens], h)
            if slot != NO_SLOT:
                state[slot] = h.view(state.shape[1:])
    y.addcmul_(d, x_f)
    return (y if z is None else y.mul_(F.silu(z.float()))).to(x.dtype)


def _step(
    y: torch.Tensor,
    dt: torch.Tensor,
    dt_x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    at: Tokens,
    states: torch.Tensor,
) -> torch.Tensor:
    """Fill y for one token of each request, without d and z; return the states after them."""
    h = states.view(-1, *a.shape)  # [R, C, N]
    h *= (dt[at].unsqueeze(2) * a).exp_()
    h.addcmul_(dt_x[at].unsqueeze(2), b[at].unsqueeze(1))
    y[at] = (h @ c[at].unsqueeze(2)).squeeze(2)
    return states


def _scan(
    y: torch.Tensor,
    dt: torch.Tensor,
    dt_x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    h: torch.Tensor,
) -> torch.Tensor:
    """Fill y [tokens, C] of one request's next tokens, without d and z; return h [C, N] after them."""
    decays = (dt.unsqueeze(2) * a).exp_()  # [tokens, C, N]
    states = dt_x.unsqueeze(2) * b.unsqueeze(1)
    for h_t, decay in zip(states.unbind(0), decays.unbind(0), strict=True):
        h = torch.addcmul(h_t, decay, h, out=h_t)
    torch.matmul(states, c.unsqueeze(2), out=y.unsqueeze(2))
    return h
