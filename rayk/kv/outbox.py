"""Where everything lies in an engine's outboxes: caches of few blocks in host memory, one for each rank, from
which a host tier reads what the engine stores. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import KVCacheLayout
from rayk.kv.riders import tabled
from rayk.parallel.shard import EngineShape
from rayk.types.errors import UserError


def num_outbox_blocks(
    groups: Sequence[KVCacheGroup], shape: EngineShape, num_blocks: int, num_bytes: int
) -> int:
    """Count the blocks of the outboxes of an engine with so many blocks, null block included: as many on
    every rank as fit into `num_bytes` on the one with the largest. Raises UserError where that is less than
    one of each group."""
    ranks = (_outbox_rank(groups, shape, rank, 2) for rank in range(shape.num_ranks))
    block_bytes, least = max(rank.block_bytes for rank in ranks), 1 + len(tabled(groups))
    if num_bytes < least * block_bytes:
        raise UserError(
            f"an outbox of {num_bytes:,} bytes has no room for {least} blocks, one of each group and the "
            f"null block, of {block_bytes:,} bytes each",
            where="offload.outbox_mib",
            mend=f"at least {-(-least * block_bytes // 2**20)}, or 0 for none",
        )
    return min(num_bytes // block_bytes, max(num_blocks, least))


def outbox_geometry(rank: RankGeometry, num_bytes: int) -> RankGeometry:
    """Tell where everything lies in a rank's outbox: what the rank holds, in the order of canonical pages.
    Raises UserError, see `num_outbox_blocks`."""
    groups = [g.group for g in rank.groups]
    num_blocks = num_outbox_blocks(groups, rank.shape, rank.num_blocks, num_bytes)
    return _outbox_rank(groups, rank.shape, rank.rank, num_blocks)


def _outbox_rank(
    groups: Sequence[KVCacheGroup], shape: EngineShape, rank: int, num_blocks: int
) -> RankGeometry:
    return plan_rank(groups, KVCacheLayout("BHLNC"), shape=shape, rank=rank, num_blocks=num_blocks)
