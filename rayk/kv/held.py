"""Where the KV memory of requests goes that were really run, copies on several ranks included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rayk.kv.groups import KVCacheGroup, measure_groups
from rayk.kv.specs import held_blocks


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes of a KV group that requests held, each at its fullest, added up; before tensor parallelism but
    for the replicas."""

    kind: str
    num_layers: int
    block_size: int
    num_requests: int
    used_bytes: int
    """Rows of live tokens."""
    padding_bytes: int
    """Positions without a layer, and pages smaller than the largest."""
    wasted_bytes: int
    """Rows of their blocks without a live token: past the last one, or before a window."""
    replicated_bytes: int
    """What ranks held of the layers' blocks beyond one copy: heads that several ranks' readers share."""


def measure_held(groups: Sequence[KVCacheGroup], tp_size: int, lengths: Sequence[int]) -> list[HeldMemory]:
    """Per group, of requests that computed so many tokens each. Raises Unsupported if TP does not divide what
    reads the fields."""
    copies = [_replicated_bytes(group, tp_size) for group in groups]
    sums = [[0, 0, 0, 0] for _ in groups]
    for length, count in Counter(lengths).items():
        for group, extra, total, memory in zip(
            groups, copies, sums, measure_groups(groups, length), strict=True
        ):
            blocks = held_blocks(group.spec, group.spec.fullest_at(length))
            found = (memory.used_bytes, memory.padding_bytes, memory.wasted_bytes, blocks * extra)
            total[:] = [a + count * b for a, b in zip(total, found, strict=True)]
    return [
        HeldMemory(group.spec.kind, len(group.layers), group.spec.block_size, len(lengths), *total)
        for group, total in zip(groups, sums, strict=True)
    ]


def _replicated_bytes(group: KVCacheGroup, tp_size: int) -> int:
    """Of one block, all ranks together."""
    more = 0
    for field in group.spec.fields():
        units = sum(len(field.shard(tp_size, rank)) for rank in range(tp_size))
        more += (units - field.units) * field.unit_bytes
    return more * len(group.layers)
