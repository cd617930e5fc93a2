"""Convert captured rows of a quantised cache into the values that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from rayk.handover.commands import CapturedRows
from rayk.kernels.quantise import Quantised, dequantise
from rayk.kv.caches import TORCH_DTYPES
from rayk.kv.fields import PageField
from rayk.kv.formats import FORMATS
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import KVCacheSpec
from rayk.oracle.following import StoredKV, StoredRows
from rayk.transfer.verify import Rows

Scales = Mapping[int, tuple[float, float]]


def dequantised(
    captured: Sequence[CapturedRows], groups: Sequence[KVCacheGroup], scales: Scales
) -> tuple[list[CapturedRows], list[KVCacheGroup]]:
    """Convert each rank's rows to float32 where they were quantised, with groups of specs that say so.
    `scales`: layer -> (k, v) of formats that have a scale per layer; 1 for layers that are absent."""
    specs = {layer: g.spec for g in groups if is_quantised(g.spec) for layer in g.layers}
    found = [
        {
            layer: _plain(rows, specs[layer], scales.get(layer, (1.0, 1.0))) if layer in specs else rows
            for layer, rows in per_rank.items()
        }
        for per_rank in captured
    ]
    return found, [replace(g, spec=_plain_spec(g.spec)) if is_quantised(g.spec) else g for g in groups]


def stored_kv(captured: Sequence[CapturedRows], groups: Sequence[KVCacheGroup], num_tokens: int) -> StoredKV:
    """Join a prompt's rows of all ranks, of what `dequantised` returned: attention keys and values in
    float32."""
    found: dict[int, dict[str, StoredRows]] = {}
    for group in groups:
        names = {f.name: f.dtype for f in group.spec.fields()}
        if not group.spec.has_token_rows or set(names) != {"k", "v"}:
            continue
        for layer in group.layers:
            live = group.seen_by(layer).live_rows(num_tokens)
            if not live:
                continue
            heads = {key: rows for rank in captured for key, rows in rank[layer].items()}
            found[layer] = {
                side: StoredRows(live.start, torch.stack(_of_side(heads, side, dtype)))
                for side, dtype in names.items()
            }
    return found


def _of_side(heads: Rows, side: str, dtype: str) -> list[torch.Tensor]:
    units = sorted(unit for name, unit in heads if name == side)
    return [torch.from_numpy(np.array(heads[side, u])).view(TORCH_DTYPES[dtype]).float() for u in units]


def e4m3_scales(groups: Sequence[KVCacheGroup], scales: Scales) -> dict[int, dict[str, float]]:
    """List layer -> field -> scale of what is stored as fp8_e4m3 with a scale per layer and side."""
    return {
        layer: dict(zip((f.name for f in g.spec.fields()), scales.get(layer, (1.0, 1.0)), strict=False))
        for g in groups
        if g.spec.has_token_rows and g.spec.dtype == "fp8_e4m3"
        for layer in g.layers
    }


def is_quantised(spec: KVCacheSpec) -> bool:
    """Tell whether values were divided by scales before they were stored."""
    return spec.has_token_rows and spec.dtype in FORMATS and FORMATS[spec.dtype].is_quantised


def _plain_spec(spec: KVCacheSpec) -> KVCacheSpec:
    return cast(KVCacheSpec, replace(cast(Any, spec), dtype="float32"))


def _plain(rows: Rows, spec: KVCacheSpec, scales: tuple[float, float]) -> Rows:
    """Convert one layer's rows on one rank; what is not of attention stays."""
    fields = {f.name: f for f in spec.fields()}
    plain = {key: values for key, values in rows.items() if key[0] not in fields}
    sides = [name for name in fields if not name.endswith("_scale")]
    for side, scale in zip(sides, scales, strict=True):
        for name, unit in rows:
            if name != side:
                continue
            data = _typed(rows[name, unit], fields[name])
            beside = f"{side}_scale"
            own = _typed(rows[beside, unit], fields[beside]) if beside in fields else None
            values = dequantise(Quantised(data, own), FORMATS[spec.dtype], scale, impl="reference")
            plain[side, unit] = values.contiguous().view(torch.uint8).numpy()
    return plain


def _typed(rows: np.ndarray, field: PageField) -> torch.Tensor:
    return torch.from_numpy(np.array(rows)).view(TORCH_DTYPES[field.dtype])
