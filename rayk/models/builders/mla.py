"""Building multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayk.models.builders.context import Build, CachingMixer


def build_mla(build: Build, index: int) -> CachingMixer:
    """The rank's share of layer `index`."""
    raise AssertionError(f"layer {index}: multi-head latent attention cannot be built yet")
