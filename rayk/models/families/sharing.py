"""Layers that use an earlier layer's keys and values, in any family whose layers all attend.

Either of two keys of config.json:

 num_kv_shared_layers   each of the last so many layers uses the last unshared layer of its type (window and
                        chunk); 0 or null: none (gemma3n/configuration_gemma3n.py:207)
 kv_sharing_targets     one entry per layer: the layer whose keys and values it uses, null for its own

Key and value weights that a checkpoint holds for sharing layers are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rayk.models.config import DecoderConfig, LayerConfig, why_bad_source
from rayk.models.families.raw import RawConfig
from rayk.types.errors import CheckpointError

COUNT, TARGETS = "num_kv_shared_layers", "kv_sharing_targets"


def apply_sharing(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """`config` with the sharing that `raw` asks for.

    Raises CheckpointError for impossible values, and UnsupportedArchitecture if layers are not plain
    attention.
    """
    count, targets = raw.whole(COUNT, 0), raw.get(TARGETS)
    if not count and targets is None:
        return config
    if count and targets is not None:
        raise CheckpointError(
            f"`{COUNT}` and `{TARGETS}` both say which layers share", where=raw.where, mend="leave one out"
        )
    _require_attention(raw, config, COUNT if count else TARGETS)
    sources = (
        shared_sources(raw, config.layers, count) if count else _targets(raw, targets, len(config.layers))
    )
    layers = tuple(
        replace(layer, kv_source=source) for layer, source in zip(config.layers, sources, strict=True)
    )
    for index in range(len(layers)):
        reason = why_bad_source(layers, index)
        if reason is not None:
            raise CheckpointError(
                f"`{TARGETS}`: {reason}",
                where=raw.where,
                mend="name an earlier layer of the same type that has its own, or null",
            )
    return replace(config, layers=layers)


def shared_sources(raw: RawConfig, layers: Sequence[LayerConfig], count: int) -> tuple[int | None, ...]:
    """Per layer the layer it uses if the last `count` share; None for its own.

    Raises CheckpointError if there are not enough layers, or none of a sharing layer's type.
    """
    num_own = len(layers) - count
    if num_own < 1:
        raise CheckpointError(
            f"`{COUNT}` {count} leaves none of {len(layers)} layers with keys and values of its own",
            where=raw.where,
            mend=f"at most {len(layers) - 1}",
        )
    last = {_type_of(layer): index for index, layer in enumerate(layers[:num_own])}
    for index, layer in enumerate(layers[num_own:], num_own):
        if _type_of(layer) not in last:
            raise CheckpointError(
                f"`{COUNT}` {count}: layer {index} (window {layer.window}, chunk {layer.chunk}) would reuse "
                f"the last layer of its type among layers 0 to {num_own - 1}, and there is none",
                where=raw.where,
                mend="let fewer layers share",
            )
    return (None,) * num_own + tuple(last[_type_of(layer)] for layer in layers[num_own:])


def _type_of(layer: LayerConfig) -> tuple[str, int | None, int | None]:
    return layer.mixer, layer.window, layer.chunk


def _require_attention(raw: RawConfig, config: DecoderConfig, key: str) -> None:
    for index, layer in enumerate(config.layers):
        if layer.mixers != ("attention",):
            raise raw.refuse(
                f"`{key}` is not supported in family {config.family}: the mixer of layer {index} is "
                f"{layer.mixer}",
                "layers can share keys and values where all of them are plain attention",
            )


def _targets(raw: RawConfig, values: object, num_layers: int) -> tuple[int | None, ...]:
    """Return the list, with its form checked."""
    if not isinstance(values, list) or len(values) != num_layers:
        raise CheckpointError(
            f"`{TARGETS}` must list {num_layers} layers, not {values!r}",
            where=raw.where,
            mend="one entry per layer: the layer whose keys and values it reuses, or null",
        )
    for index, value in enumerate(values):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise CheckpointError(
                f"`{TARGETS}`[{index}] must be the number of a layer or null, not {value!r}", where=raw.where
            )
    return tuple(values)
