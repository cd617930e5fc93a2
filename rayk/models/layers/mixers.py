"""A layer's mixer by its kind: one, or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import torch

from rayk.kv.caches import OwnsCache
from rayk.models.build import Build
from rayk.models.config import PARTS
from rayk.models.layers.attention import build_attention
from rayk.models.layers.gdn import build_gdn
from rayk.models.layers.mamba1 import build_mamba1
from rayk.models.layers.mamba2 import build_mamba2
from rayk.models.layers.mla import build_mla
from rayk.models.layers.places import Places
from rayk.parallel.comm import Comm


class Mixer(Protocol):
    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank; partial sums in a ParallelLayer."""
        ...


class CachingMixer(Mixer, OwnsCache, Protocol):
    """A mixer that owns one part of its layer's cache."""


BUILDERS: Mapping[str, Callable[[Build, int], CachingMixer]] = MappingProxyType(
    {
        "attention": build_attention,
        "mla": build_mla,
        "mamba1": build_mamba1,
        "mamba2": build_mamba2,
        "gdn": build_gdn,
    }
)
"""Kind of mixer -> the function that builds the rank's share of it in a layer."""


class SideBySide:
    """The sum of the mixers' outputs, whose partial sums are added over the ranks together."""

    def __init__(self, mixers: Mapping[str, Mixer], comm: Comm, *, reduce: bool = True) -> None:
        """`mixers`, by the cache part that each owns, leave their sums partial. `reduce` as in
        RowParallelLinear."""
        self.mixers = dict(mixers)
        self._comm = comm
        self._reduce = reduce and comm.size > 1

    def forward(self, x: torch.Tensor, places: Places, metadata: Mapping[str, Any]) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; `metadata` by part."""
        outs = [mixer.forward(x, places, metadata[part]) for part, mixer in self.mixers.items()]
        out = sum(outs[1:], start=outs[0])
        return self._comm.all_reduce(out) if self._reduce else out


def build_mixer(build: Build, index: int) -> tuple[Mixer | None, Mapping[str, OwnsCache]]:
    """Build the mixer of layer `index`, if it has one, and the mixers by the cache part they use."""
    kinds = build.config.layers[index].mixers
    if not kinds:
        return None, {}
    if len(kinds) == 1:
        mixer = BUILDERS[kinds[0]](build, index)
        return mixer, {PARTS[kinds[0]]: mixer}
    partial = replace(build, reduce=False)
    mixers = {PARTS[kind]: BUILDERS[kind](partial, index) for kind in kinds}
    assert len(mixers) == len(kinds), f"layer {index}: two mixers own one part of the cache"
    return SideBySide(mixers, build.comm, reduce=build.reduce), mixers
