"""Building a layer: its norms around a mixer, a feed-forward half, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from rayk.models.builders.altup import build_altup_layer
from rayk.models.builders.attention import build_attention
from rayk.models.builders.gdn import build_gdn
from rayk.models.builders.mamba1 import build_mamba1
from rayk.models.builders.mamba2 import build_mamba2
from rayk.models.builders.mla import build_mla
from rayk.models.builders.mlp import build_mlp
from rayk.models.builders.moe import build_moe
from rayk.models.config import PARTS, ExpertsConfig
from rayk.models.decoder import Layer, ParallelLayer
from rayk.models.layers.side_by_side import SideBySide

if TYPE_CHECKING:
    from rayk.kv.caches import OwnsCache
    from rayk.models.builders.context import Build, CachingMixer
    from rayk.models.config import LayerConfig
    from rayk.models.decoder import Mixer, Mlp
    from rayk.models.layers.altup import AltUpLayer


BUILDERS: Mapping[str, Callable[[Build, int], CachingMixer]] = MappingProxyType(
    {
        "attention": build_attention,
        "mla": build_mla,
        "mamba1": build_mamba1,
        "mamba2": build_mamba2,
        "gdn": build_gdn,
    }
)
"""LayerConfig.mixers -> builder."""


class BuiltLayer(NamedTuple):
    """A layer, and what of it uses which part of a cache: its own, or that of its `kv_source`."""

    layer: Layer | ParallelLayer | AltUpLayer
    users: Mapping[str, OwnsCache]


def build_layer(build: Build, index: int) -> BuiltLayer:
    """Layer `index` of the rank's decoder."""
    config = build.config.layers[index]
    if build.config.block == "parallel":
        return _parallel(replace(build, reduce=False), index, config)
    assert build.config.block in ("sequential", "post_norms"), build.config.block
    mixer, owners = _mixer(build, index, config)
    mlp = _mlp(build, index, config)
    post = build.config.block == "post_norms"
    if build.config.altup is not None:
        assert mixer is not None, "a layer of several streams has both halves"
        assert mlp is not None, "a layer of several streams has both halves"
        return BuiltLayer(build_altup_layer(build, index, build.config.altup, mixer, mlp), owners)
    has_mixer, has_mlp = mixer is not None, mlp is not None
    layer = Layer(
        input_norm=build.layer_norm(index, "input_norm") if has_mixer else None,
        mixer=mixer,
        post_mixer_norm=build.layer_norm(index, "post_mixer_norm") if has_mixer and post else None,
        mlp_norm=build.layer_norm(index, "mlp_norm") if has_mlp else None,
        mlp=mlp,
        post_mlp_norm=build.layer_norm(index, "post_mlp_norm") if has_mlp and post else None,
        residual_multiplier=build.config.residual_multiplier,
        dtype=build.pieces.dtype if build.config.residual_wide else None,
    )
    return BuiltLayer(layer, owners)


def _parallel(build: Build, index: int, config: LayerConfig) -> BuiltLayer:
    assert build.config.residual_multiplier == 1.0, "not in parallel blocks"
    assert not build.config.residual_wide, "not in parallel blocks"
    mixer, owners = _mixer(build, index, config)
    mlp = _mlp(build, index, config)
    assert mixer is not None, "a parallel block has both halves"
    assert mlp is not None, "a parallel block has both halves"
    norm = build.layer_norm(index, "input_norm")
    return BuiltLayer(ParallelLayer(input_norm=norm, mixer=mixer, mlp=mlp, comm=build.comm), owners)


def _mixer(build: Build, index: int, config: LayerConfig) -> tuple[Mixer | None, Mapping[str, OwnsCache]]:
    if not config.mixers:
        return None, {}
    if len(config.mixers) == 1:
        (kind,) = config.mixers
        mixer = BUILDERS[kind](build, index)
        return mixer, {PARTS[kind]: mixer}
    partial = replace(build, reduce=False)
    mixers = {PARTS[kind]: BUILDERS[kind](partial, index) for kind in config.mixers}
    assert len(mixers) == len(config.mixers), f"layer {index}: two mixers own one part of the cache"
    return SideBySide(mixers, build.comm, reduce=build.reduce), mixers


def _mlp(build: Build, index: int, config: LayerConfig) -> Mlp | None:
    if config.mlp is None:
        return None
    if isinstance(config.mlp, ExpertsConfig):
        return build_moe(build, index, config.mlp)
    return build_mlp(build, index, config.mlp)
