"""One request's block table in one group, and which rows its blocks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.groups import KVCacheGroup
from rayk.kv.prefix_cache import Since


@dataclass(slots=True)
class BlockTable:
    """One request's block table in one group. The first `num_trimmed` entries are null."""

    blocks: list[int]
    num_trimmed: int = 0
    num_named: int = 0
    """Number of leading entries that are in the prefix cache or will never be."""
    since: Since | None = None
    """Per lane, the first row that is present; None means all rows are."""
    filled: Mapping[int, Since] = field(default_factory=dict)
    """Entries filled from another place -> first row present per lane (empty: all); overrides `since`."""

    @property
    def lacks_last(self) -> bool:
        """Whether rows of the last lane are missing."""
        return bool(self.since and self.since[-1])

    def lack_last(self, num_lanes: int, num_tokens: int) -> None:
        """Rows of the last lane are missing, at least those of so many tokens."""
        since = self.since or (0,) * num_lanes
        self.since = (*since[:-1], max(since[-1], num_tokens))

    def have_last(self) -> None:
        """Rows of the last lane are all there: blocks are to be named once more."""
        if self.since:
            self.since = (*self.since[:-1], 0)
        self.filled = {index: (*since[:-1], 0) if since else since for index, since in self.filled.items()}
        self.num_named = 0


def live_part(group: KVCacheGroup, table: BlockTable, num_tokens: int) -> BlockTable | None:
    """Return the part of a table that is live after `num_tokens` tokens; None if some of these rows are
    missing or will be overwritten."""
    size = group.spec.block_size
    # Where rows of draft layers lack, the rest goes without them.
    starts = [lane.live_rows(num_tokens).start for lane in group.own_lanes]
    stop = -(-num_tokens // size)
    # At a chunk's end nothing is live, even if the last block has room.
    first = min(starts) // size if min(starts) < num_tokens else stop
    blocks = table.blocks[first:stop]
    if len(table.blocks) < stop or NULL_BLOCK in blocks:
        return None
    if not group.spec.has_token_rows and num_tokens % size:
        return None
    since = table.since or (0,) * len(group.lanes)
    if any(start < min(row, num_tokens) for row, start in zip(since, starts, strict=False)):
        return None
    return BlockTable([NULL_BLOCK] * first + blocks, first, stop, table.since)


def since_in(group: KVCacheGroup, index: int, since: Since | None) -> Since:
    """Per lane, the first row present in entry `index` of a table; 0 if all rows are. A state has one row,
    that of its block's last token."""
    if since is None or not group.spec.has_token_rows:
        return (0,) * len(group.lanes)
    first, stop = index * group.spec.block_size, (index + 1) * group.spec.block_size
    return tuple(0 if row <= first else min(row, stop) for row in since)


def num_real(tables: Sequence[BlockTable]) -> int:
    """Count the blocks in the tables without the null blocks."""
    return sum(b != NULL_BLOCK for t in tables for b in t.blocks)
