"""KV cache groups: layers of equal spec that share one block table.

Every group draws block ids from one pool, so each must fill the same block bytes: groups have the same
number of positions, short ones are padded. Chosen from canonical sizes, never from TP, rank or layout,
so that both sides of a transfer choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayk.kv.specs import KVCacheSpec, page_bytes

CacheKey = tuple[int, str]
"""(layer, part): one of a layer's caches; part is the spec's, attention or state."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers sharing a block table. `layers[i]` is the layer at position i."""

    index: int
    spec: KVCacheSpec
    layers: tuple[int, ...]
    num_positions: int
    """Positions of a block; those past len(layers) are padding."""


def group_size(counts: list[int]) -> int:
    """Positions per group for these layer counts per kind.

    The smallest count, unless the largest is within half of it: then padding the small kind wastes less
    than splitting the large one (as vLLM's grouping does; the fixtures agree).
    """
    low, high = min(counts), max(counts)
    return high if high < 1.5 * low else low


def wasted_bytes(groups: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """Per group, the canonical bytes of each of its blocks that no layer uses: padding positions, and pages
    padded to the largest group's."""
    page = max((page_bytes(g.spec) for g in groups), default=0)
    return tuple(g.num_positions * page - len(g.layers) * page_bytes(g.spec) for g in groups)


def group_layers(specs: Mapping[int, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Groups for layer index -> spec, kinds in order of first appearance.

    A kind with more layers than a group's size is dealt round-robin into several groups.
    """
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer in sorted(specs):
        kinds.setdefault(specs[layer], []).append(layer)
    if not kinds:
        return ()
    size = group_size([len(layers) for layers in kinds.values()])
    groups: list[KVCacheGroup] = []
    for spec, layers in kinds.items():
        num_groups = -(-len(layers) // size)
        for i in range(num_groups):
            groups.append(KVCacheGroup(len(groups), spec, tuple(layers[i::num_groups]), size))
    return tuple(groups)
