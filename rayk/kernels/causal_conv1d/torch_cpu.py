"""causal_conv1d on a CPU: W multiply-adds over tiles of tokens; requests that go token by token run
together."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.states import Tokens, read_states, split_stepwise

TILE_ELEMENTS = 1 << 17
"""Elements of [tokens, C] in float32: half a MiB, which stays in a core's cache."""


def causal_conv1d_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    segments: Segments,
    *,
    activation: str | None,
) -> torch.Tensor:
    num_channels, width = weight.shape
    by_tap = weight.float().T.contiguous()  # [W, C]
    start = torch.zeros(num_channels) if bias is None else bias.float()
    y = torch.empty(x.shape)
    stepwise, walks = split_stepwise(segments)
    if stepwise is not None:
        stepwise.run(state, partial(_step, y, x, by_tap, start))
    tile = max(1, TILE_ELEMENTS // num_channels)
    for walk in walks:
        taps = read_states(state, torch.tensor([walk.read_slot])).reshape(num_channels, width - 1)
        rows = torch.cat([taps.T.to(x.dtype), x[walk.start : walk.stop]])  # the inputs before come first
        for first in range(0, walk.stop - walk.start, tile):
            piece = rows[first : first + tile + width - 1].float()
            columns = [piece[w : len(piece) - (width - 1) + w] for w in range(width)]
            tokens = slice(walk.start + first, walk.start + first + len(columns[0]))
            y[tokens] = _weigh(columns, by_tap, start)
        for end, slot in walk.segments:
            if slot != NO_SLOT:
                kept = rows[end - walk.start :][: width - 1]
                state[slot] = kept.T.reshape(state.shape[1:]).to(state.dtype)
    return (F.silu(y, inplace=True) if activation == "silu" else y).to(x.dtype)


def _step(
    y: torch.Tensor,
    x: torch.Tensor,
    by_tap: torch.Tensor,
    start: torch.Tensor,
    tokens: Tokens,
    states: torch.Tensor,
) -> torch.Tensor:
    """Fill y for one token of each request, before the activation; return the taps after them."""
    num_taps, num_channels = len(by_tap) - 1, by_tap.shape[1]
    newest = x[tokens]
    taps = states.reshape(-1, num_channels, num_taps)
    y[tokens] = _weigh([*taps.float().unbind(2), newest.float()], by_tap, start)
    # Every tap moves one place towards the oldest: a shift of the whole row, then the newest on top.
    kept = torch.empty_like(taps)
    kept.view(len(taps), -1)[:, :-1] = taps.view(len(taps), -1)[:, 1:]
    kept[:, :, -1] = newest
    return kept.view(states.shape)


def _weigh(columns: list[torch.Tensor], by_tap: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """start + sum over w of by_tap[w] * columns[w], each [rows, C] float32."""
    y = torch.addcmul(start, columns[0], by_tap[0])
    for column, weight in zip(columns[1:], by_tap[1:], strict=True):
        y.addcmul_(column, weight)
    return y
