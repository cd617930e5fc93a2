"""Where rows arrive that are converted on receive: pages as the producer lays them out, on the consumer's
shard. Free of torch."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, lcm

from rayk.kv.geometry import RankGeometry, layout_veto, plan_rank
from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import KVCacheLayout
from rayk.kv.specs import num_kept_blocks, with_block_size
from rayk.transfer.drafts import left_out

MIN_WIRE_BYTES = 256 << 20
WIRE_SHARE = 8
"""A wire cache takes up to one part in so many of the rank's own pages, or MIN_WIRE_BYTES where that is more;
never more than the longest request that the rank can hold needs."""


def needs_conversion(producer: RankGeometry, consumer: RankGeometry) -> bool:
    """Tell whether any layer's format differs."""
    out = left_out(producer, consumer)
    ours, theirs = (
        {key: g.group.spec.fields() for g in side.groups for key in g.group.keys if key not in out}
        for side in (producer, consumer)
    )
    return any(
        [(f.name, f.row_bytes, f.dtype) for f in fields]
        != [(f.name, f.row_bytes, f.dtype) for f in theirs.get(key, fields)]
        for key, fields in ours.items()
    )


def wire_geometry(producer: RankGeometry, consumer: RankGeometry, num_blocks: int) -> RankGeometry:
    """Blocks and layout are the producer's, as far as can be: with as many ranks, a block is one run. Where
    the consumer deals tokens a block covers whole turns of its deal, too."""
    out = left_out(producer, consumer)
    kept = [g for g in producer.groups if not out.keys() & {*g.group.keys}]
    groups = [_of_whole_turns(g.group, consumer.share.tokens.period) for g in kept]
    is_dealt_alike, layout = _deal(producer) == _deal(consumer), producer.layout
    # Blocks that are dealt unlike may fill up unlike: only blocks that lie by themselves can be padded.
    if not is_dealt_alike and layout_veto(groups, layout, dcp=consumer.shape.dcp) is not None:
        layout = KVCacheLayout("BHLNC")
    return plan_rank(
        groups,
        layout,
        shape=consumer.shape,
        rank=consumer.rank,
        num_blocks=num_blocks,
        kernel_block_sizes=[g.kernel_block_size for g in kept] if is_dealt_alike else None,
    )


def _deal(side: RankGeometry) -> tuple[int, int]:
    return side.shape.dcp, side.shape.dcp_interleave


def _of_whole_turns(group: KVCacheGroup, period: int) -> KVCacheGroup:
    """Lengthen the blocks of a group until they hold whole turns."""
    if not group.spec.has_token_rows:
        return group
    num_tokens = lcm(group.spec.block_size, period)
    seen = tuple(with_block_size(spec, num_tokens) for spec in group.seen)
    return replace(group, spec=with_block_size(group.spec, num_tokens), seen=seen)


def num_wire_blocks(producer: RankGeometry, consumer: RankGeometry) -> int:
    """Count the blocks that the wire caches of a pair of engines can have for this rank of the consumer, null
    block included."""
    own = [g for g in consumer.groups if g.group.rides is None]
    growing = [g.group.spec for g in own if g.group.spec.has_token_rows]
    per_token = sum(1 / spec.block_size for spec in growing)
    num_tokens = ceil((consumer.num_pool_blocks - 1) / per_token) if growing else 1
    like = wire_geometry(producer, consumer, 2)
    needed = sum(num_kept_blocks(g.group.spec, num_tokens) for g in like.groups if g.group.rides is None)
    allowed = max(MIN_WIRE_BYTES, consumer.pages_bytes // WIRE_SHARE) // like.block_bytes
    return 1 + max(1, min(needed, allowed))
