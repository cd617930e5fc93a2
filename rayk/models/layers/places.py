"""What the positions of a step's tokens do in a layer: computed once per step, not per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from rayk.models.layers.rope import Rotary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rayk.models.config import LayerConfig, TemperatureConfig
    from rayk.models.layers.rope import Rotation


class Places(NamedTuple):
    """Of the T tokens of one step, for the layers with one rope and one temperature."""

    rotation: Rotation | None
    """Of queries and keys."""
    query_factors: torch.Tensor | None = None
    """What queries are multiplied by, float32 [T, 1, 1]."""


class Placing:
    """Positions -> what each layer makes of them. Layers with equal settings share one answer."""

    def __init__(self, layers: Iterable[LayerConfig], *, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: the model's."""
        self._settings = [(layer.rope, layer.temperature) for layer in layers]
        ropes = dict.fromkeys(rope for rope, _ in self._settings if rope is not None)
        self._rotaries = [Rotary(rope, dtype=dtype, device=device) for rope in ropes]

    def at(self, positions: torch.Tensor) -> list[Places]:
        """Of every layer, for tokens at `positions` [T]."""
        rotations = {rotary.config: rotary.at(positions) for rotary in self._rotaries}
        factors = {
            temperature: query_factors(temperature, positions)
            for temperature in dict.fromkeys(temperature for _, temperature in self._settings)
            if temperature is not None
        }
        return [
            Places(
                None if rope is None else rotations[rope],
                None if temperature is None else factors[temperature],
            )
            for rope, temperature in self._settings
        ]


def query_factors(config: TemperatureConfig, positions: torch.Tensor) -> torch.Tensor:
    """What the queries of tokens at `positions` [T] are multiplied by, float32 [T, 1, 1]."""
    grown = torch.log1p(torch.floor((positions.float() + 1) / config.floor))
    return (grown * config.scale + 1)[:, None, None]
