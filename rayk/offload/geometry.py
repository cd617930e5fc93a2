"""Where a host tier's pages lie."""

from __future__ import annotations

from collections.abc import Sequence

from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import KVCacheLayout
from rayk.kv.riders import tabled
from rayk.types.errors import UserError
from rayk.types.offload import OffloadSettings


def tier_geometry(groups: Sequence[KVCacheGroup], settings: OffloadSettings) -> RankGeometry:
    """Tell where everything lies in a tier of `host_bytes`. Raises UserError where not even two blocks
    fit."""
    layout = KVCacheLayout(settings.layout)
    block_bytes = plan_rank(groups, layout, num_blocks=2).block_bytes
    num_blocks, least = settings.host_bytes // block_bytes, 1 + len(tabled(groups))
    if num_blocks < least:
        raise UserError(
            f"a host tier of {settings.host_bytes:,} bytes has no room for {least} blocks, one of each group "
            f"and the null block, of {block_bytes:,} bytes each",
            where="offload.host_gib",
            mend=f"at least {least * block_bytes / 2**30:.6f}",
        )
    return plan_rank(groups, layout, num_blocks=num_blocks)
