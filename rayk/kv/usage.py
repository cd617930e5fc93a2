"""Counts of blocks that requests and leases hold, updated with each change because metrics ask often."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.block_tables import BlockTable

Tables = Sequence[BlockTable]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Totals of blocks put aside for a transfer, under a lease or reserved for incoming tokens."""

    num_leased: int
    """Put aside since the engine was formed."""
    num_freed: int
    """Given back of these."""

    @property
    def num_held(self) -> int:
        return self.num_leased - self.num_freed


class BlockUsage:
    """Blocks in use by group, each counted once however many tables it is in."""

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._used = [array("i", bytes(4 * num_blocks)) for _ in range(num_groups)]
        """Counts, for each block, the requests whose table contains it."""
        self._leased = [array("i", bytes(4 * num_blocks)) for _ in range(num_groups)]
        """Counts, for each block, the leases whose table contains it."""
        self._num_used, self._num_leased, self._num_both = ([0] * num_groups for _ in range(3))

    def hold(self, group: int, blocks: Iterable[int], *, leased: bool = False) -> None:
        """Count that these blocks are in one more table; null blocks are skipped."""
        here, other, num_here = self._sides(group, leased)
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            here[block] += 1
            if here[block] == 1:
                num_here[group] += 1
                self._num_both[group] += bool(other[block])

    def hold_fresh(self, group: int, blocks: Sequence[int]) -> None:
        """The same of blocks that were just handed out: they are in a request's table, and in no other."""
        used = self._used[group]
        for block in blocks:
            used[block] = 1
        self._num_used[group] += len(blocks)

    def drop(self, group: int, blocks: Iterable[int], *, leased: bool = False) -> None:
        """Count that these blocks are in one table fewer."""
        here, other, num_here = self._sides(group, leased)
        num_gone = num_alone = 0
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            left = here[block] - 1
            assert left >= 0, f"block {block} is in no table"
            here[block] = left
            if not left:
                num_gone += 1
                num_alone += not other[block]
        num_here[group] -= num_gone
        self._num_both[group] -= num_gone - num_alone

    def change_hands(self, tables: Tables, *, leased: bool) -> None:
        """Move a request's tables to a lease, or back."""
        for group, table in enumerate(tables):
            self.hold(group, table.blocks, leased=leased)
            self.drop(group, table.blocks, leased=not leased)

    def num_used(self, group: int) -> int:
        return self._num_used[group]

    def num_leased(self, group: int) -> int:
        """Count the blocks that only leases hold."""
        return self._num_leased[group] - self._num_both[group]

    def check(self, used: Iterable[Tables], leased: Iterable[Tables]) -> None:
        """Assert that the counts match these tables."""
        again = BlockUsage(len(self._used), len(self._used[0]))
        for sides, is_leased in ((used, False), (leased, True)):
            for tables in sides:
                for group, table in enumerate(tables):
                    again.hold(group, table.blocks, leased=is_leased)
        assert vars(again) == vars(self), "blocks are counted wrongly"

    def _sides(self, group: int, leased: bool) -> tuple[array[int], array[int], list[int]]:
        """Return the counts of one side, those of the other, and by group how many blocks the first has."""
        used, leases = self._used[group], self._leased[group]
        return (leases, used, self._num_leased) if leased else (used, leases, self._num_used)
