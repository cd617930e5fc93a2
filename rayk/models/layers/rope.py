"""Rotary position embedding: pairs of dimensions of q and k rotate with the token's position."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from rayk.kernels.pointwise import rotate_halves, rotate_pairs
from rayk.models.config import RopeConfig


class Rotation(NamedTuple):
    """cos and sin of one step's angles, each [T, 1, rotary_size / 2] in the model's dtype, or float32."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    """Dimension 2i rotates with 2i + 1; else i with i + rotary_size / 2."""


class Rotary:
    """The angles of one RopeConfig. Layers with equal configs share one."""

    def __init__(self, config: RopeConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        assert config.pairing in ("half", "interleaved"), config
        assert not config.wide or config.pairing == "interleaved", config
        self.config = config
        self._dtype = dtype
        self._inverse_frequencies = inverse_frequencies(config).to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of tokens at `positions` [T]. Angles are float32 products."""
        angles = positions.float()[:, None, None] * self._inverse_frequencies
        cos, sin, factor = angles.cos(), angles.sin(), self.config.attention_factor
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        if not self.config.wide:
            cos, sin = cos.to(self._dtype), sin.to(self._dtype)
        return Rotation(cos, sin, self.config.pairing == "interleaved")


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Compute the radians per position of each pair, float32 [rotary_size / 2]."""
    steps = torch.arange(0, config.rotary_size, 2, dtype=torch.float32) / config.rotary_size
    return _SCALED[config.kind](config, config.theta**steps)


def _llama3(config: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """As in the Llama 3.1 release.

    Wavelengths above original_max_positions / low_freq_factor are stretched by `factor`, those below
    original_max_positions / high_freq_factor are kept, and those between are blended.
    """
    frequencies = 1.0 / periods
    wavelengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = (config.original_max_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    scaled = torch.where(
        wavelengths > config.original_max_positions / low, frequencies / config.factor, blended
    )
    return torch.where(wavelengths < config.original_max_positions / high, frequencies, scaled)


def _yarn(config: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """High frequencies are kept, low ones divided by `factor`, linearly blended over the pairs between
    `beta_fast` and `beta_slow` turns (arXiv 2309.00071, section 3.2)."""
    size = config.rotary_size

    def pair_with(turns: float) -> float:
        """Return the (fractional) pair that turns so often over the original positions."""
        positions = config.original_max_positions / (turns * 2 * math.pi)
        return size * math.log(positions) / (2 * math.log(config.theta))

    first, last = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001  # no division by zero; the border falls between two pairs all the same
    pairs = torch.arange(size // 2, dtype=torch.float32)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return (1.0 / (config.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


_SCALED: dict[str, Callable[[RopeConfig, torch.Tensor], torch.Tensor]] = {
    "default": lambda config, periods: 1.0 / periods,
    "linear": lambda config, periods: (1.0 / periods) / config.factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": lambda config, periods: (
        1.0 / (torch.tensor(config.short_factors, dtype=torch.float32) * periods)
    ),
}


def rotate(x: torch.Tensor, rotation: Rotation, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate the first 2 * (angles) dimensions of x [T, heads, D]; the rest pass through. The result goes to
    `out`, or a new tensor."""
    turn = rotate_pairs if rotation.interleaved else rotate_halves
    return turn(x, rotation.cos, rotation.sin, out=out)


def rotate_into_halves(
    x: torch.Tensor, rotation: Rotation, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate all of x [T, heads, rotary_size]; pairs come out as i and i + rotary_size / 2.

    Interleaved pairs are separated on the way: only products of two vectors rotated like this are meaningful.
    """
    if not rotation.interleaved:
        return rotate(x, rotation, out=out)
    return rotate_pairs(x, rotation.cos, rotation.sin, into_halves=True, out=out)
