"""Building gated delta nets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayk.models.builders.context import Build, CachingMixer


def build_gdn(build: Build, index: int) -> CachingMixer:
    """The rank's share of layer `index`."""
    raise AssertionError(f"layer {index}: gated delta nets cannot be built yet")
