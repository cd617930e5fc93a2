"""ssd_scan on a CPU: matrix products over chunks of tokens; requests that go token by
token run together.

Inside a chunk, y_i = sum over j <= i of (c_i . b_j) exp(cum_i - cum_j) dt_j x_j, cum being the running sum of
dt a; the state from before the chunk adds exp(cum_i) h c_i (arXiv:2405.21060, section 6).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.states import Tokens, read_states, split_stepwise

CHUNK_TOKENS = 64
"""At head_size 64 and state size 128, a chunk costs as many products inside it as with the state."""


def ssd_scan_torch(
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
    x_f, b, c = x.float(), b.float(), c.float()
    dt = F.softplus(dt.float() + dt_bias)
    log_decay = dt * a
    dt_x = dt.unsqueeze(2) * x_f
    y = torch.empty_like(dt_x)
    stepwise, walks = split_stepwise(segments)
    if stepwise is not None:
        stepwise.run(state, partial(_step, y, log_decay, dt_x, b, c, group_index))
    for walk in walks:
        h = read_states(state, torch.tensor([walk.read_slot]))[0]
        for start, stop, slot in walk.chunks(CHUNK_TOKENS):
            tokens = slice(start, stop)
            h = _chunk(y[tokens], log_decay[tokens], dt_x[tokens], b[tokens], c[tokens], group_index, h)
            if slot != NO_SLOT:
                state[slot] = h
    return y.addcmul_(d.unsqueeze(1), x_f).to(x.dtype)


def _step(
    y: torch.Tensor,
    log_decay: torch.Tensor,
    dt_x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    group_index: torch.Tensor,
    at: Tokens,
    h: torch.Tensor,
) -> torch.Tensor:
    """Fill y for one token of each request, without d x; return the states [R, H, P, N] after them."""
    h *= log_decay[at].exp()[:, :, None, None]
    h.addcmul_(dt_x[at].unsqueeze(3), b[at][:, group_index].unsqueeze(2))
    y[at] = (h @ c[at][:, group_index].unsqueeze(3)).squeeze(3)
    return h


def _chunk(
    y: torch.Tensor,
    log_decay: torch.Tensor,
    dt_x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    group_index: torch.Tensor,
    h: torch.Tensor,
) -> torch.Tensor:
    """Fill y [n, H, P] of one request's next n tokens, without d x; return h [H, P, N] after them."""
    # In float64: a difference of float32 sums would lose how little decays between two late tokens.
    total = log_decay.double().cumsum(0).T  # [H, n]
    until_end = (total[:, -1:] - total).float().exp_().unsqueeze(2)  # [H, n, 1]
    since = (total.unsqueeze(2) - total.unsqueeze(1)).float()  # [H, n, n]
    future = torch.ones(since.shape[1:], dtype=torch.bool).triu_(1)
    b, c, dt_x = b.transpose(0, 1), c.transpose(0, 1), dt_x.transpose(0, 1)  # heads or groups first
    weights = since.masked_fill_(future, float("-inf")).exp_() * (c @ b.mT)[group_index]
    from_start = total.float().exp_().unsqueeze(2)  # [H, n, 1]
    from_state = (c[group_index] @ h.mT).mul_(from_start)  # [H, n, P]
    y.copy_(torch.baddbmm(from_state, weights, dt_x).transpose(0, 1))
    return torch.baddbmm(from_start[:, -1:] * h, (until_end * dt_x).mT, b[group_index])
