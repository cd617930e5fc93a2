"""How a model can be divided over the ranks of an engine. Free of torch."""

from __future__ import annotations

from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import kv_cache_specs
from rayk.types.config import EngineConfig


def why_tp_unsupported(config: DecoderConfig, tp: int) -> str | None:
    """Say why the model cannot run at this TP size, or None if it can.

    TP must divide the readers of every cache field (query heads, heads of a state, runs of channels).
    Feed-forward halves and vocabularies divide at any size.
    """
    specs = dict.fromkeys(kv_cache_specs(config, block_size=1, dtype="float32").values())
    for field in (field for spec in specs for field in spec.fields()):
        if field.readers % tp:
            return f"TP {tp} does not divide the model's {field.readers} {field.reader_name}"
    return None


def why_shape_unsupported(config: DecoderConfig, engine: EngineConfig) -> str | None:
    """Say why rayk's engine cannot compute with units, tokens and layers divided like this, or None.

    Geometry, plans and `rayk explain` know any division; these are limits of the engine. All of them stand
    here, and on docs/sharding.md.
    """
    why = why_tp_unsupported(config, engine.tp)
    if why is None and engine.dcp > 1:
        why = f"an engine with dcp: {engine.dcp} cannot be run yet"
    if why is None and engine.pp > 1:
        why = f"an engine with pp: {engine.pp} cannot be run yet"
    return why
