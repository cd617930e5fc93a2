"""Rank 0's record of the blocks of an engine's outboxes: the same ones are free, or in use, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rayk.handover.commands import BlockTables
from rayk.kv.block_pool import NULL_BLOCK, BlockPool
from rayk.kv.groups import KVCacheGroup
from rayk.kv.riders import of_groups, tabled


class OutboxRoom:
    """A store takes blocks for what it moves, and gives them back when the tier has read them."""

    def __init__(self, groups: Sequence[KVCacheGroup], num_blocks: int) -> None:
        """`num_blocks`: of each outbox, null block included."""
        self._all_groups = groups
        self._groups = tabled(groups)
        """Those that have block tables, which come first."""
        self.pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks that there are, in use or not."""
        return self.pool.num_blocks - 1

    def num_needed(self, tables: BlockTables, rows: range) -> int:
        """Count the blocks of tables that hold any of these rows."""
        parts = (t[_places(g, t, rows)] for g, t in zip(self._groups, tables, strict=False))
        return sum(len(part) - part.count(NULL_BLOCK) for part in parts)

    def can_hold(self, rows: range) -> bool:
        """Tell whether these rows fit, as far as they are live at their end, if nothing else is there."""
        needed = 0
        for g in self._groups:
            size, live = g.spec.block_size, g.spec.live_rows(rows.stop)
            needed += -(-live.stop // size) - max(live.start, rows.start) // size
        return needed <= self.num_blocks

    def parts(self, rows: range, unit_tokens: int) -> Iterator[range]:
        """Cut rows into parts that fit, at whole units. Parts of one unit may still be too large."""
        first = rows.start
        for end in range(first + unit_tokens, rows.stop, unit_tokens):
            if not self.can_hold(range(first, min(end + unit_tokens, rows.stop))):
                yield range(first, end)
                first = end
        yield range(first, rows.stop)

    def take(self, tables: BlockTables, rows: range) -> BlockTables:
        """Take blocks for those of tables that hold any of these rows; null blocks elsewhere. Raises
        OutOfBlocks where there are too few."""
        free = iter(self.pool.allocate(self.num_needed(tables, rows)))
        found = []
        for g, table in zip(self._groups, tables, strict=False):
            places, taken = _places(g, table, rows), [NULL_BLOCK] * len(table)
            taken[places] = [NULL_BLOCK if b == NULL_BLOCK else next(free) for b in table[places]]
            found.append(tuple(taken))
        return of_groups(self._all_groups, found)

    def give_back(self, tables: BlockTables) -> None:
        """Nobody reads these blocks any more."""
        for _, table in zip(self._groups, tables, strict=False):
            self.pool.free(table)


def _places(group: KVCacheGroup, table: tuple[int, ...], rows: range) -> slice:
    """Return the places in a table of blocks that hold any of these rows."""
    size = group.spec.block_size
    return slice(rows.start // size, min(-(-rows.stop // size), len(table)))
