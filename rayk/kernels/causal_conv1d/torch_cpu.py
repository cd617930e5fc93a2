"""causal_conv1d on a CPU: all requests at once, W multiply-adds over whole tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rayk.kernels.segments import Segments
from rayk.kernels.states import read_states, write_states


def causal_conv1d_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    segments: Segments,
    *,
    activation: str | None,
) -> torch.Tensor:
    """Arguments and result as `causal_conv1d`."""
    num_channels, width = weight.shape
    num_taps = width - 1
    taps = read_states(state, segments.read_slots).reshape(-1, num_channels, num_taps).to(x.dtype)
    if segments.is_single_step:
        # The taps of the state lie beside each other, so the newest joins them: [R, C, W].
        window = torch.cat([taps, x.unsqueeze(2)], dim=2)
        kept = window[:, :, 1:]
        columns = window.float().unbind(2)
    else:
        rows, kept = _rows_with_history(x, taps, segments)
        rows = rows.float()
        columns = tuple(rows[w : len(rows) - num_taps + w] for w in range(width))
    y = _weigh(columns, weight.float(), bias)
    if not segments.is_single_step:
        y = y[_row_of_token(segments, num_taps) - num_taps]
    out = (F.silu(y) if activation == "silu" else y).to(x.dtype)
    write_states(state, segments.write_slots, kept.reshape(-1, *state.shape[1:]))
    return out


def _weigh(
    columns: tuple[torch.Tensor, ...], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """bias + sum over w of weight[:, w] * columns[w], each [rows, C] float32."""
    y = columns[0] * weight[:, 0] if bias is None else torch.addcmul(bias.float(), columns[0], weight[:, 0])
    for w, column in enumerate(columns[1:], 1):
        y.addcmul_(column, weight[:, w])
    return y


def _rows_with_history(
    x: torch.Tensor, taps: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every request's kept inputs, then its tokens: [T + R (W - 1), C]; and from them the inputs that each
    segment leaves behind, [S, C, W - 1]."""
    num_requests, num_channels, num_taps = taps.shape
    rows = x.new_empty(len(x) + num_requests * num_taps, num_channels)
    rows[_row_of_token(segments, num_taps)] = x
    before = torch.arange(num_taps)
    first_rows = segments.query_start_loc[:-1].long() + num_taps * torch.arange(num_requests)
    rows[first_rows[:, None] + before] = taps.mT
    num_segments = segments.segment_start_loc.diff()
    request = torch.repeat_interleave(torch.arange(num_requests), num_segments)
    kept_rows = segments.segment_ends.long() + num_taps * request
    return rows, rows[kept_rows[:, None] + before].mT


def _row_of_token(segments: Segments, num_taps: int) -> torch.Tensor:
    """[T], where each packed token lies behind the histories of its own and earlier requests."""
    lens = segments.query_start_loc.diff()
    request = torch.repeat_interleave(torch.arange(len(lens)), lens)
    return torch.arange(len(request)) + num_taps * (request + 1)
