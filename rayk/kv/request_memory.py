"""KV memory that the requests of a run held, replicas on several ranks included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rayk.kv.groups import KVCacheGroup, measure_groups
from rayk.kv.specs import num_kept_blocks
from rayk.parallel.shard import EngineShape


@dataclass(frozen=True, slots=True)
class RequestMemory:
    """Bytes of a KV group that requests held, each at its fullest, summed; before tensor parallelism except
    for replicas."""

    kind: str
    num_layers: int
    block_size: int
    num_requests: int
    used_bytes: int
    padding_bytes: int
    wasted_bytes: int
    replicated_bytes: int
    """Bytes beyond one copy of the layers' blocks: heads that several ranks hold."""


def measure_request_memory(
    groups: Sequence[KVCacheGroup],
    tp_size: int,
    lengths: Sequence[int],
    dcp: int = 1,
    draft_tp: int = 1,
) -> list[RequestMemory]:
    """Per group, the memory of requests that computed `lengths` tokens, on ranks of which `dcp` deal the
    tokens of heads they share (blocks of `groups` count them all), and each `draft_tp` share the units of a
    drafter. Raises Unsupported if TP does not divide the fields' readers."""
    shape = EngineShape(tp_size, dcp, draft_tp=draft_tp)
    copies = [_replicated_bytes(group, shape) for group in groups]
    sums = [[0, 0, 0, 0] for _ in groups]
    for length, count in Counter(lengths).items():
        for group, extra, total, memory in zip(
            groups, copies, sums, measure_groups(groups, length), strict=True
        ):
            blocks = num_kept_blocks(group.spec, group.spec.fullest_at(length))
            found = (memory.used_bytes, memory.padding_bytes, memory.wasted_bytes, blocks * extra)
            total[:] = [a + count * b for a, b in zip(total, found, strict=True)]
    return [
        RequestMemory(group.spec.kind, len(group.layers), group.spec.block_size, len(lengths), *total)
        for group, total in zip(groups, sums, strict=True)
    ]


def _replicated_bytes(group: KVCacheGroup, shape: EngineShape) -> int:
    """Sum the replicated bytes of one block over all ranks."""
    more, is_draft = 0, group.rides is not None
    # A unit's ranks keep a block's rows between them, one copy per run of `dcp`; states are not dealt.
    dealt = shape.dcp if group.spec.has_token_rows and not is_draft else 1
    shares = [shape.unit_share(rank, is_draft=is_draft) for rank in range(shape.tp)]
    for field in group.spec.fields():
        units = sum(len(field.shard(*share)) for share in shares) // dealt
        more += (units - field.units) * field.unit_bytes
    return more * len(group.layers)
