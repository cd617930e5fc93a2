"""The tensor-parallel sizes at which a model can run. Free of torch."""

from __future__ import annotations

from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import kv_cache_specs


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
