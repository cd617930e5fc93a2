"""What each layer of a model keeps in the KV cache. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from inspect import signature
from types import MappingProxyType

from rayk.kv.formats import engine_format
from rayk.kv.groups import CacheKey, KVCacheGroup, group_layers
from rayk.kv.riders import Riders, add_riders
from rayk.kv.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GatedDeltaNetSpec,
    KVCacheSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    SlidingWindowSpec,
)
from rayk.models.config import DecoderConfig, LayerConfig
from rayk.types.config import EngineConfig
from rayk.types.offload import OffloadSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class _SpecSettings:
    """The engine's settings that specs depend on."""

    block_size: int
    dtype: str
    hybrid_kv: bool
    state_block_size: int
    conv_dtype: str


def kv_cache_specs(
    config: DecoderConfig,
    *,
    block_size: int,
    dtype: str,
    hybrid_kv: bool = True,
    state_block_size: int | None = None,
    conv_dtype: str | None = None,
) -> dict[CacheKey, KVCacheSpec]:
    """Return (layer, part) -> spec, for the layers that own a cache; block sizes in tokens.

    Without `hybrid_kv`, windowed and chunked layers keep every token too (but attend as locally), so that all
    attention layers fall into full groups. `state_block_size` None: the model's positions, so that a request
    has one block of states. `conv_dtype`: of the convolution inputs that are kept; None: `dtype`.
    """
    settings = _SpecSettings(
        block_size=block_size,
        dtype=dtype,
        hybrid_kv=hybrid_kv,
        state_block_size=state_block_size or config.max_positions,
        conv_dtype=conv_dtype or dtype,
    )
    specs: dict[CacheKey, KVCacheSpec] = {}
    for index, layer in enumerate(config.layers):
        if layer.kv_source is not None:
            continue  # it uses the cache of another layer
        for mixer, part in zip(layer.mixers, layer.parts, strict=True):
            spec = _LOWERED[mixer](config, layer, settings)
            assert spec.part == part, f"layer {index}: {mixer} is lowered to a spec of {spec.part}"
            specs[index, part] = spec
    return specs


def engine_specs(engine: EngineConfig, config: DecoderConfig) -> dict[CacheKey, KVCacheSpec]:
    return kv_cache_specs(
        config,
        block_size=engine.block_size,
        dtype=engine_format(engine.dtype, engine.kv_dtype, engine.kv_scales),
        hybrid_kv=engine.hybrid_kv,
        state_block_size=engine.state_block_size,
        conv_dtype=engine.dtype,
    )


def engine_groups(
    engine: EngineConfig, config: DecoderConfig, riders: Riders | None = None
) -> tuple[KVCacheGroup, ...]:
    """Group the engine's KV specs, with grown blocks; of all its layers and tokens, whichever rank keeps
    them. Behind them those of its drafter's layers. Raises Unsupported where these cannot ride."""
    kept_as = engine_format(engine.dtype, engine.kv_dtype, engine.kv_scales)
    sizes = (engine.block_size, engine.state_block_size)
    groups = _groups(config, kept_as, engine.dtype, *sizes, hybrid_kv=engine.hybrid_kv, dcp=engine.dcp)
    return groups if riders is None else add_riders(groups, riders)


@lru_cache(maxsize=1024)
def _groups(
    config: DecoderConfig,
    dtype: str,
    conv_dtype: str,
    block_size: int,
    state_block_size: int | None,
    *,
    hybrid_kv: bool,
    dcp: int,
) -> tuple[KVCacheGroup, ...]:
    """Cached, because the cells of a matrix ask for the same groups many times."""
    specs = partial(
        kv_cache_specs,
        config,
        dtype=dtype,
        conv_dtype=conv_dtype,
        block_size=block_size,
        state_block_size=state_block_size,
    )
    return group_layers(specs(hybrid_kv=hybrid_kv), specs(hybrid_kv=True), dcp=dcp)


def tier_groups(
    engine: EngineConfig, config: DecoderConfig, settings: OffloadSettings, riders: Riders | None = None
) -> tuple[KVCacheGroup, ...]:
    """Return the KV groups of a host tier behind engines like this, of which some have this drafter."""
    return engine_groups(tier_engine(engine, config, settings), config, riders)


def tier_engine(engine: EngineConfig, config: DecoderConfig, settings: OffloadSettings) -> EngineConfig:
    """Return the engine that a host tier behind engines like this is, but that it computes nothing: it has
    the tier's block sizes and layout, and keeps a state per attention block."""
    whole = replace(engine, tp=1, dcp=1, pp=1, pp_layers=None, device="cpu", layout=settings.layout)
    like = replace(whole, block_size=settings.block_size, kernel_block_size=None, kernel_block_sizes=())
    groups = engine_groups(like, config)
    rows = max((g.spec.block_size for g in groups if g.spec.has_token_rows), default=settings.block_size)
    return replace(like, state_block_size=settings.state_block_size or rows)


def group_chunks(groups: Sequence[KVCacheGroup], config: DecoderConfig) -> tuple[tuple[int, ...], ...]:
    """For each group the lengths of its layers' chunks, ascending.

    The groups' specs cannot tell: without hybrid_kv, chunked layers lie in groups that keep every token.
    """
    found = (
        {config.layers[n].chunk for n in g.layers if g.spec.has_token_rows and g.rides is None}
        for g in groups
    )
    return tuple(tuple(sorted(n for n in chunks if n is not None)) for chunks in found)


def _attention(config: DecoderConfig, layer: LayerConfig, settings: _SpecSettings) -> KVCacheSpec:
    full = (
        settings.block_size,
        config.num_kv_heads,
        config.head_size_k,
        config.head_size_v,
        settings.dtype,
        config.num_query_heads,
    )
    if settings.hybrid_kv and layer.window is not None:
        return SlidingWindowSpec(*full, layer.window)
    if settings.hybrid_kv and layer.chunk is not None:
        return ChunkedLocalSpec(*full, layer.chunk)
    return FullAttentionSpec(*full)


def _mla(config: DecoderConfig, _: LayerConfig, settings: _SpecSettings) -> KVCacheSpec:
    assert config.mla is not None
    return MlaSpec(
        block_size=settings.block_size,
        latent_size=config.mla.latent_size,
        rope_size=config.mla.rope_size,
        dtype=settings.dtype,
        num_query_heads=config.num_query_heads,
    )


def _state(
    kind: str,
    spec: Callable[..., KVCacheSpec],
    config: DecoderConfig,
    _: LayerConfig,
    settings: _SpecSettings,
) -> KVCacheSpec:
    """Fill a recurrent spec with the mixer settings of the same names."""
    own = getattr(config, kind)
    asked = {name: getattr(own, name) for name in signature(spec).parameters if hasattr(own, name)}
    return spec(block_size=settings.state_block_size, dtype=settings.conv_dtype, **asked)


_LOWERED: Mapping[str, Callable[[DecoderConfig, LayerConfig, _SpecSettings], KVCacheSpec]] = MappingProxyType(
    {
        "attention": _attention,
        "mla": _mla,
        "mamba1": partial(_state, "mamba1", Mamba1Spec),
        "mamba2": partial(_state, "mamba2", Mamba2Spec),
        "gdn": partial(_state, "gdn", GatedDeltaNetSpec),
    }
)
"""Mixer -> its spec."""
