"""Scales of a quantised KV cache that a checkpoint may hold: a float32 per layer for keys, one for values.

Released fp8 checkpoints name them `...self_attn.k_scale` or `...self_attn.k_proj.k_scale` (and v); the cache
stores the key divided by it. For nvfp4 it is the global scale. The default is 1.
"""

from __future__ import annotations

import math

from rayk.models.families import WeightNames
from rayk.models.weights import WeightReader
from rayk.types.errors import CheckpointError


def read_kv_scales(reader: WeightReader, names: WeightNames, layer: int) -> tuple[float, float]:
    """Read the scales (k, v) of a layer. Raises CheckpointError unless they are positive and finite."""
    k, v = (
        next((s for name in scale_names(names, layer, side) if (s := _read(reader, name)) is not None), 1.0)
        for side in ("k", "v")
    )
    return k, v


def scale_names(names: WeightNames, layer: int, side: str) -> tuple[str, ...]:
    """Possible names on disk of the scale of `side` (k or v)."""
    module = names.in_layer(layer, "o.weight").rsplit(".", 2)[0]
    return f"{module}.{side}_scale", f"{module}.{side}_proj.{side}_scale"


def _read(reader: WeightReader, name: str) -> float | None:
    found = reader.scalar(name)
    if found is not None and not (math.isfinite(found) and found > 0):
        raise CheckpointError(
            f"tensor {name} is {found}, and scales what is cached",
            where=str(reader.folder),
            mend="a positive number, or leave the tensor out",
        )
    return found
