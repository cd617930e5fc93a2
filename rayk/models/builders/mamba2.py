"""Building Mamba2 mixers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayk.models.builders.context import Build, CachingMixer


def build_mamba2(build: Build, index: int) -> CachingMixer:
    """The rank's share of layer `index`."""
    raise AssertionError(f"layer {index}: Mamba2 mixers cannot be built yet")
