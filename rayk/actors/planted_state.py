"""wrong_kv in recurrent layers: a rank that keeps its own states wrongly.

A mistake is made in the slots that a step writes, through the views the layer's kernels use, after the step
(or in what the step is told, before it). Whatever the layer computes next starts from it, as with a bug of
the kernel's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rayk.kv.caches import FieldView
    from rayk.models.decoder import Decoder, Mixer
    from rayk.models.layers.rope import Rotation

Fields = Mapping[str, "FieldView"]

SWAPPED = (("conv_b", "conv_c"), ("conv_q", "conv_k"))
"""Fields of one shape that a swap would exchange."""


def wrong_state(decoder: Decoder, layer: int, point: str, conv_width: int) -> Mixer:
    """The layer's mixer, making the mistake `point` (a key of STATE_POINTS) from now on."""
    mixer = decoder.layers[layer].mixer
    assert mixer is not None
    fields = {f.name: f for f in decoder.cache_owners[layer, "state"].field_views()}
    if point == "stale_state":
        return _StaleState(mixer)
    return _SpoiledState(mixer, fields, STATE_POINTS[point], conv_width - 1)


def _swap(fields: Fields, slots: torch.Tensor, num_taps: int) -> None:
    first, second = next(pair for pair in SWAPPED if pair[0] in fields)
    a, b = fields[first].view, fields[second].view
    a[slots], b[slots] = b[slots].clone(), a[slots].clone()


def _shift_taps(fields: Fields, slots: torch.Tensor, num_taps: int) -> None:
    for name, field in fields.items():
        if name.startswith("conv_"):
            values = field.view[slots]
            taps = values.view(*values.shape[:-1], -1, num_taps)
            field.view[slots] = taps.roll(1, -1).flatten(-2)


def _half_as_wide(fields: Fields, slots: torch.Tensor, num_taps: int) -> None:
    """The recurrent state is written as bfloat16 where float32 is read."""
    state = next(field.view for name, field in fields.items() if not name.startswith("conv_"))
    values = state[slots]
    written = torch.zeros_like(values)
    written.view(torch.bfloat16)[..., : values.shape[-1]] = values.to(torch.bfloat16)
    state[slots] = written


Spoil = Callable[[Fields, torch.Tensor, int], None]

STATE_POINTS: Mapping[str, Spoil | None] = {
    "swap_taps": _swap,
    "shift_taps": _shift_taps,
    "state_dtype": _half_as_wide,
    "stale_state": None,
}
"""What wrong_kv can do to a recurrent layer: exchange the taps of B and C (of q and k), move all taps one
place on, write the state in another dtype, or start a request from what its page held before."""


def _segments(metadata: Any) -> Any:
    """What a recurrent mixer is told of the step (kernels.segments); a slot below 0 is none."""
    return metadata["state"] if isinstance(metadata, Mapping) else metadata


class _SpoiledState:
    """A mixer whose states are spoiled when written. Implements models.decoder.Mixer."""

    def __init__(self, mixer: Mixer, fields: Fields, spoil: Spoil | None, num_taps: int) -> None:
        assert spoil is not None
        self._mixer = mixer
        self._fields = fields
        self._spoil = spoil
        self._num_taps = num_taps

    def forward(self, x: torch.Tensor, rotation: Rotation | None, metadata: Any) -> torch.Tensor:
        """See Mixer."""
        out = self._mixer.forward(x, rotation, metadata)
        slots = _segments(metadata).write_slots
        self._spoil(self._fields, slots[slots >= 0], self._num_taps)
        return out


class _StaleState:
    """A mixer that begins no request at zero, but with what lies in the slot it will write to."""

    def __init__(self, mixer: Mixer) -> None:
        self._mixer = mixer

    def forward(self, x: torch.Tensor, rotation: Rotation | None, metadata: Any) -> torch.Tensor:
        """See Mixer."""
        segments = _segments(metadata)
        own = segments.write_slots[segments.segment_start_loc[:-1].long()]
        stale = torch.where(segments.read_slots < 0, own, segments.read_slots)
        wrong = replace(segments, read_slots=stale, read_slots_cpu=tuple(stale.tolist()))
        if isinstance(metadata, Mapping):
            return self._mixer.forward(x, rotation, {**metadata, "state": wrong})
        return self._mixer.forward(x, rotation, wrong)
