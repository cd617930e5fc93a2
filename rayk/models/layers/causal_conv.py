"""The convolution before a recurrent scan, over parts that are cut and cached in units of their own.

Shapes: T packed tokens, B state slots, U units of a part and D channels of each, W taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from rayk.kernels.causal_conv1d import causal_conv1d
from rayk.kernels.segments import Segments
from rayk.kv.caches import FieldView


@dataclass(frozen=True, slots=True)
class ConvPart:
    """Channels of one page field: `units` (global ids, ascending) of `unit_size` channels each."""

    name: str
    """Name of the field and of its bundle."""
    units: tuple[int, ...]
    unit_size: int

    @property
    def num_channels(self) -> int:
        return len(self.units) * self.unit_size


@dataclass(frozen=True, slots=True)
class _Run:
    """Parts convolved by one launch: channels [start, stop), and the views of their taps."""

    parts: tuple[ConvPart, ...]
    start: int
    stop: int
    taps: torch.Tensor
    """[B, U, D, W - 1], or [B, 1, channels, W - 1] of several adjacent parts."""


class CausalConv:
    """Convolves the channels of all parts. Parts whose taps are adjacent in memory take one launch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: tuple[ConvPart, ...]) -> None:
        """weight [C, W] and bias [C] hold the parts' channels one after the other."""
        self.parts = parts
        self._weight = weight
        self._bias = bias
        self._runs: tuple[_Run, ...] = ()
        assert weight.shape[0] == sum(part.num_channels for part in parts), (weight.shape, parts)

    def bind(self, bundles: Mapping[str, torch.Tensor]) -> None:
        """Use the taps in `bundles` [B, U, 1, D * (W - 1)], by the parts' names, from now on."""
        num_taps = self._weight.shape[1] - 1
        runs: list[_Run] = []
        start = 0
        for part in self.parts:
            view = bundles[part.name]
            assert view.shape[1:] == (len(part.units), 1, part.unit_size * num_taps), (part, view.shape)
            taps = view.view(*view.shape[:2], part.unit_size, num_taps)
            run = _Run((part,), start, start + part.num_channels, taps)
            joined = _join(runs[-1], run) if runs else None
            if joined is None:
                runs.append(run)
            else:
                runs[-1] = joined
            start = run.stop
        self._runs = tuple(runs)

    def unbind(self) -> None:
        self._runs = ()

    def field_views(self) -> tuple[FieldView, ...]:
        """Taps [B, U, 1, D * (W - 1)] of every part, as they are convolved."""
        assert self._runs, "no taps are bound"
        return tuple(view for run in self._runs for view in _field_views(run))

    def forward(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        """silu(conv(x)): [T, C] -> [T, C]; keeps the last inputs of each segment."""
        assert self._runs, "no taps are bound"
        outs = [
            causal_conv1d(
                x[:, run.start : run.stop],
                self._weight[run.start : run.stop],
                None if self._bias is None else self._bias[run.start : run.stop],
                run.taps,
                segments,
                activation="silu",
            )
            for run in self._runs
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _join(left: _Run, right: _Run) -> _Run | None:
    """Return one run if the taps of all channels of a slot are one stretch of memory, else None."""
    flat = [_flat(run.taps) for run in (left, right)]
    if any(view is None for view in flat):
        return None
    first, second = (view for view in flat if view is not None)
    if first.stride(0) != second.stride(0) or first.dtype != second.dtype:
        return None
    if second.data_ptr() != first.data_ptr() + first.shape[1] * first.element_size():
        return None
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    num_taps = left.taps.shape[3]
    shape = (first.shape[0], 1, right.stop - left.start, num_taps)
    stride = (first.stride(0), shape[2] * num_taps, num_taps, 1)
    taps = first.as_strided(shape, stride, first.storage_offset())
    return _Run((*left.parts, *right.parts), left.start, right.stop, taps)


def _flat(taps: torch.Tensor) -> torch.Tensor | None:
    """[B, U * D * (W - 1)] as a view, or None if units lie apart."""
    _, num_units, size, num_taps = taps.shape
    if num_units > 1 and taps.stride(1) != size * num_taps:
        return None
    return taps.as_strided((taps.shape[0], num_units * size * num_taps), (taps.stride(0), 1))


def _field_views(run: _Run) -> list[FieldView]:
    if len(run.parts) == 1:
        (part,) = run.parts
        return [FieldView(part.name, run.taps.view(*run.taps.shape[:2], 1, -1), part.units)]
    channels = run.taps.squeeze(1)
    edges = [0]
    for part in run.parts:
        edges.append(edges[-1] + part.num_channels)
    views = []
    for part, (start, stop) in zip(run.parts, pairwise(edges), strict=True):
        own = channels[:, start:stop].view(len(channels), len(part.units), 1, -1)
        views.append(FieldView(part.name, own, part.units))
    return views
