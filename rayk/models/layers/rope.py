"""Rotary position embedding, "half" pairing: dimension i turns with i + rotary_size / 2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from rayk.models.config import RopeConfig


class Rotation(NamedTuple):
    """cos and sin of one step's angles, each [T, 1, rotary_size / 2] in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary:
    """The angles of one RopeConfig. Layers with equal configs share one."""

    def __init__(self, config: RopeConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._dtype = dtype
        self._inverse_frequencies = inverse_frequencies(config).to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at `positions` [T]. Angles are float32 products, as everywhere."""
        angles = positions.float()[:, None, None] * self._inverse_frequencies
        return Rotation(angles.cos().to(self._dtype), angles.sin().to(self._dtype))


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Radians per position of each pair, float32 [rotary_size / 2].

    llama3 scaling as in the Llama 3.1 release: wavelengths above
    original_max_positions / low_freq_factor are stretched by `factor`, those below
    original_max_positions / high_freq_factor are kept, and between them the two are blended.
    """
    size = config.rotary_size
    steps = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / (config.theta**steps)
    if config.kind == "default":
        return frequencies
    if config.kind == "linear":
        return frequencies / config.factor
    assert config.kind == "llama3", config.kind
    wavelengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = (config.original_max_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    scaled = torch.where(
        wavelengths > config.original_max_positions / low, frequencies / config.factor, blended
    )
    return torch.where(wavelengths < config.original_max_positions / high, frequencies, scaled)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """x [T, heads, D] with its first 2 * (angles) dimensions turned; the rest pass through."""
    half = rotation.cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = rotation
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)
