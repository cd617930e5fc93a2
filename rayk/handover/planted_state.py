"""wrong_kv in recurrent layers: a rank that keeps its own states wrongly.

A mistake is made in the slots that a step writes, through the views the layer's kernels use, after the step
(or in what the step is told, before it). Whatever the layer computes next starts from it, as with a bug of
the kernel's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rayk.kv.fields import PageField, twin_taps
from rayk.models.kv_specs import kv_cache_specs

if TYPE_CHECKING:
    from rayk.models.decoder import Decoder
    from rayk.models.layers.mixers import Mixer
    from rayk.models.layers.places import Places

Views = Mapping[str, torch.Tensor]
"""Field -> what the layer's kernels use of it, [B, U, 1, C]."""
Spoil = Callable[[Sequence[PageField], Views, torch.Tensor], None]
"""Given a layer's fields, their views and the slots [S] that a step wrote."""


def wrong_state(decoder: Decoder, layer: int, point: str) -> Mixer:
    """Return the layer's mixer, which makes the mistake `point` (of STATE_POINTS) from now on."""
    mixer = decoder.layer(layer).mixer
    assert mixer is not None, f"layer {layer} has no mixer"
    if point == "stale_state":
        return _StaleState(mixer)
    views = {f.name: f.view for f in decoder.cache_owners[layer, "state"].field_views()}
    # What the fields mean; neither block size nor dtype is looked at.
    spec = kv_cache_specs(decoder.config, block_size=1, dtype="float32")[layer, "state"]
    return _SpoiledState(mixer, spec.fields(), views, SPOILS[point])


def _swap(fields: Sequence[PageField], views: Views, slots: torch.Tensor) -> None:
    """The taps of B and C, or of q and k, are exchanged."""
    twins = twin_taps(fields)
    assert twins is not None, "the layer keeps no two taps that are alike"
    a, b = (views[field.name] for field in twins)
    a[slots], b[slots] = b[slots].clone(), a[slots].clone()


def _shift_taps(fields: Sequence[PageField], views: Views, slots: torch.Tensor) -> None:
    """All taps are moved one place on."""
    for field in fields:
        if field.taps:
            values = views[field.name][slots]
            taps = values.view(*values.shape[:-1], -1, field.taps)
            views[field.name][slots] = taps.roll(1, -1).flatten(-2)


def _half_as_wide(fields: Sequence[PageField], views: Views, slots: torch.Tensor) -> None:
    """The recurrent state is written as bfloat16 where float32 is read."""
    state = next(views[field.name] for field in fields if not field.taps)
    values = state[slots]
    written = torch.zeros_like(values)
    written.view(torch.bfloat16)[..., : values.shape[-1]] = values.to(torch.bfloat16)
    state[slots] = written


SPOILS: Mapping[str, Spoil] = {
    "swap_taps": _swap,
    "shift_taps": _shift_taps,
    "state_dtype": _half_as_wide,
}
"""What wrong_kv does to the slots that a recurrent layer has written, by point."""


def _segments(metadata: Any) -> Any:
    """Return what a recurrent mixer is told of the step (kernels.segments); a slot below 0 is none."""
    return metadata["state"] if isinstance(metadata, Mapping) else metadata


class _SpoiledState:
    """A mixer whose states are spoiled when written. Implements models.layers.mixers.Mixer."""

    def __init__(self, mixer: Mixer, fields: Sequence[PageField], views: Views, spoil: Spoil) -> None:
        self._mixer = mixer
        self._fields = fields
        self._views = views
        self._spoil = spoil

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        out = self._mixer.forward(x, places, metadata)
        slots = _segments(metadata).write_slots
        self._spoil(self._fields, self._views, slots[slots >= 0])
        return out


class _StaleState:
    """A mixer that begins no request at zero, but with what lies in the slot it will write to."""

    def __init__(self, mixer: Mixer) -> None:
        self._mixer = mixer

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        segments = _segments(metadata)
        own = segments.write_slots[segments.segment_start_loc[:-1].long()]
        stale = torch.where(segments.read_slots < 0, own, segments.read_slots)
        wrong = replace(segments, read_slots=stale)
        if isinstance(metadata, Mapping):
            return self._mixer.forward(x, places, {**metadata, "state": wrong})
        return self._mixer.forward(x, places, wrong)
