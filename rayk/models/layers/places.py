"""The effect of a step's positions on a layer, computed once per step instead of per layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from rayk.models.config import LayerConfig, TemperatureConfig
from rayk.models.layers.rope import Rotary, Rotation


class Places(NamedTuple):
    """Rotation and query factors of a step's T tokens, for the layers with one rope and one temperature."""

    rotation: Rotation | None
    query_factors: torch.Tensor | None = None
    """Factors on queries, float32 [T, 1, 1]."""


class Placing:
    """Positions -> each layer's Places. Layers with equal settings share the result."""

    def __init__(self, layers: Iterable[LayerConfig], *, dtype: torch.dtype, device: torch.device) -> None:
        self._settings = [(layer.rope, layer.temperature) for layer in layers]
        ropes = dict.fromkeys(rope for rope, _ in self._settings if rope is not None)
        self._rotaries = [Rotary(rope, dtype=dtype, device=device) for rope in ropes]

    def at(self, positions: torch.Tensor) -> list[Places]:
        """Compute the Places of every layer, for tokens at `positions` [T]."""
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
    """Compute the factors on the queries of tokens at `positions` [T], float32 [T, 1, 1]."""
    grown = torch.log1p(torch.floor((positions.float() + 1) / config.floor))
    return (grown * config.scale + 1)[:, None, None]
