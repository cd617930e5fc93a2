"""A vLLM worker's caches in rayk's canonical coordinates: digests, raw rows and views of a request's blocks.

Layers have the model's numbers, and units are those of the whole model. So engines of any TP size, block size
and layout have equal words for equal KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rayk.kernels.digest import native_digest
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import KVCacheSpec, with_block_size
from rayk.transfer.layer_view import LayerView, make_layer_view
from rayk.transfer.verify import (
    CanonicalViews,
    Digests,
    Rows,
    compute_digests,
    fetch_rows,
    sorted_views,
)
from rayk.types.errors import Unsupported
from rayk.vllm.layer_caches import LayerCache, Rank, read_layers

ROWS_PER_GROUP = 16
"""Token rows of a digest word. A prefix that D has already ends at a multiple of D's block size. If 16
divides the block size, no word mixes rows of that prefix with rows that were transferred."""

BlockIds = Sequence[Sequence[int]]
"""A request's block ids as vLLM hands them out: per KV cache group, in order of position."""


@dataclass(frozen=True, eq=False)
class _Cache:
    """One cache of a layer, in its canonical group."""

    of: LayerCache
    group: KVCacheGroup
    num_blocks: int
    """The manager's."""

    def view(self, block_ids: BlockIds) -> LayerView:
        """Return a copy of the request's blocks: block i of the view is the i-th of the request."""
        ids = np.asarray(block_ids[self.of.vllm_group], dtype=np.int64)
        strange = ids[(ids < 0) | (ids >= self.num_blocks)]
        if len(strange):
            raise ValueError(f"block {strange[0]} of group {self.of.vllm_group}: there are {self.num_blocks}")
        return make_layer_view(self.of.layer, self.group, self.of.gather(torch.from_numpy(ids)))


class ProvenCaches:
    """One worker of a vLLM engine; build it in `register_kv_caches`, when caches are bound to layers.

    Raises Unsupported, naming the layer and what to change, for what rayk cannot prove.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        kv_caches: Mapping[str, Any],
        tp_rank: int,
        tp_size: int,
    ) -> None:
        _refuse_parallelism(vllm_config)
        native_digest()  # Built here, once, rather than while a request waits.
        num_blocks = kv_cache_config.num_blocks
        model = vllm_config.model_config
        of_model = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
        rank = Rank(tp_rank, tp_size, num_blocks, *of_model)
        layers = vllm_config.compilation_config.static_forward_context
        self._caches = _number_groups(read_layers(layers, kv_cache_config, kv_caches, rank), num_blocks)
        # Views of no blocks will do: which words there are does not depend on the request.
        self._empty = sorted_views(
            [c.view([()] * len(kv_cache_config.kv_cache_groups)) for c in self._caches]
        )
        self.description: dict[str, Any] = {
            "tp_rank": tp_rank,
            "tp_size": tp_size,
            "rows_per_group": ROWS_PER_GROUP,
            "layers": [_describe(cache, view) for cache, view in zip(self._caches, self._empty, strict=True)],
        }
        """JSON-able: tp_rank, tp_size, and per cache of a layer its fields, with the units that are here."""

    def digests(self, block_ids: BlockIds, num_tokens: int, first_row: int = 0) -> Digests:
        """Digest the live rows: [words], cache by cache in order of (layer, part), as
        `transfer.verify.compute_digests` lays them out. A row group that begins before `first_row` is left
        out."""
        first_row += -first_row % ROWS_PER_GROUP
        # One cache at a time, so that one layer's blocks are the most that is copied.
        words = [
            compute_digests([view], _tables(view, block_ids), num_tokens, ROWS_PER_GROUP, first_row)
            for view in self._views(block_ids)
        ]
        return np.concatenate(words) if words else np.zeros(0, dtype=np.int64)

    def rows(self, block_ids: BlockIds, num_tokens: int, first_row: int = 0) -> dict[tuple[int, str], Rows]:
        """Return (layer, part) -> the live rows from `first_row` on, raw."""
        found = {}
        for view in self._views(block_ids):
            table = _tables(view, block_ids)[view.group.index]
            found[view.layer, view.group.spec.part] = fetch_rows(view, table, num_tokens, first_row)
        return found

    def views(self, block_ids: BlockIds) -> CanonicalViews:
        """Copy the request's blocks. Block i of a view is the i-th of the request in that layer's group, so
        its block table is 0, 1, 2, ..."""
        return CanonicalViews(self._views(block_ids))

    def _views(self, block_ids: BlockIds) -> Iterator[LayerView]:
        return (cache.view(block_ids) for cache in self._caches)


def _tables(view: LayerView, block_ids: BlockIds) -> list[range]:
    """Block tables by rayk's groups for one view's copy of blocks."""
    num_blocks = max(map(len, block_ids), default=0)
    return [range(num_blocks)] * (view.group.index + 1)


def _refuse_parallelism(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name, what in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        if getattr(parallel, name, 1) != 1:
            raise Unsupported(f"{what}: rayk proves engines of tensor parallelism only; set {name} to 1")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise Unsupported(
            "speculative decoding: a draft model's layers have no place in the proof; turn it off"
        )


def _number_groups(found: Sequence[LayerCache], num_blocks: int) -> list[_Cache]:
    """Number groups in canonical order, by what their layers keep. Block sizes and vLLM's own grouping do not
    count: P and D may differ in them."""
    found = sorted(found, key=lambda c: (c.layer, c.spec.part))
    keys = [(c.layer, c.spec.part) for c in found]
    twice = [key for key, after in zip(keys, keys[1:], strict=False) if key == after]
    if twice:
        raise Unsupported(
            f"layer {twice[0][0]} has two caches of {twice[0][1]}, which rayk cannot tell apart"
        )
    members: dict[KVCacheSpec, list[int]] = {}
    for c in found:
        members.setdefault(with_block_size(c.spec, 1), []).append(c.layer)
    order = list(members)
    numbered = []
    for c in found:
        kind = with_block_size(c.spec, 1)
        layers = tuple(members[kind])
        group = KVCacheGroup(order.index(kind), c.spec, layers, len(layers))
        numbered.append(_Cache(c, group, num_blocks))
    return numbered


def _describe(cache: _Cache, view: LayerView) -> dict[str, Any]:
    spec = cache.group.spec
    return {
        "layer": cache.of.layer,
        "part": spec.part,
        "group": cache.group.index,
        "kind": spec.kind,
        "block_size": spec.block_size,
        "layout": cache.of.layout,
        "fields": [
            {
                "name": f.name,
                "units": list(seen.units),
                "of": f.units,
                "dtype": f.dtype,
                "row_bytes": f.row_bytes,
            }
            for f, seen in zip(spec.fields(), view.fields, strict=True)
        ],
    }
