"""Workers' caches without vLLM: rayk's own, as `rayk.vllm.proof.Caches`."""

from __future__ import annotations

from typing import Any

import torch

from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.verify import CanonicalViews, compute_digests, fetch_rows, sorted_views
from tests.transfer.cluster import Engine

ROWS_PER_GROUP = 4


class MadeCaches:
    """One rank of an engine of tests.transfer.cluster."""

    def __init__(self, engine: Engine, tp_rank: int, rows_per_group: int = ROWS_PER_GROUP) -> None:
        self._rows_per_group = rows_per_group
        self.all_views = sorted_views(
            [
                make_layer_view(layer, group, engine.views(tp_rank, group, layer))
                for group in engine.groups()
                for layer in group.layers
            ]
        )
        self.description: dict[str, Any] = {
            "tp_rank": tp_rank,
            "tp_size": len(engine.caches),
            "rows_per_group": rows_per_group,
            "layers": [
                {
                    "layer": view.layer,
                    "part": view.group.spec.part,
                    "group": view.group.index,
                    "kind": view.group.spec.kind,
                    "fields": [
                        {
                            "name": f.name,
                            "units": list(seen.units),
                            "of": f.units,
                            "dtype": f.dtype,
                            "row_bytes": f.row_bytes,
                        }
                        for f, seen in zip(view.group.spec.fields(), view.fields, strict=True)
                    ],
                }
                for view in self.all_views
            ],
        }

    def digests(self, block_ids, num_tokens, first_row=0):
        return compute_digests(self.all_views, block_ids, num_tokens, self._rows_per_group, first_row)

    def rows(self, block_ids, num_tokens, first_row=0):
        return {
            (v.layer, v.group.spec.part): fetch_rows(v, block_ids[v.group.index], num_tokens, first_row)
            for v in self.all_views
        }

    def views(self, block_ids) -> CanonicalViews:
        return self.all_views

    def change(self, layer: int, field: str, change) -> None:
        """`change(view)` in place: [kernel blocks, units, rows, elements] of a field."""
        seen = next(f for v in self.all_views if v.layer == layer for f in v.fields if f.name == field)
        change(seen.view)

    def copy_of(self, layer: int, field: str) -> torch.Tensor:
        seen = next(f for v in self.all_views if v.layer == layer for f in v.fields if f.name == field)
        return seen.view.clone()
