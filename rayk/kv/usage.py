"""Counts of blocks that requests and leases hold, updated with each change because metrics ask often."""

from __future__ import annotations

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

    def __init__(self, num_groups: int) -> None:
        self._used: list[dict[int, int]] = [{} for _ in range(num_groups)]
        """Block -> number of requests' tables that contain it."""
        self._leased: list[dict[int, int]] = [{} for _ in range(num_groups)]
        """Block -> number of leases' tables that contain it."""
        self._num_both = [0] * num_groups

    def hold(self, group: int, blocks: Iterable[int], *, leased: bool = False) -> None:
        """Count that these blocks are in one more table; null blocks are skipped."""
        here, other = self._sides(group, leased)
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            before = here.get(block, 0)
            here[block] = before + 1
            if not before and block in other:
                self._num_both[group] += 1

    def hold_fresh(self, group: int, blocks: Iterable[int]) -> None:
        """The same of blocks that were just handed out: they are in a request's table, and in no other."""
        used = self._used[group]
        for block in blocks:
            used[block] = 1

    def drop(self, group: int, blocks: Iterable[int], *, leased: bool = False) -> None:
        """Count that these blocks are in one table fewer."""
        here, other = self._sides(group, leased)
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            left = here[block] - 1
            if left:
                here[block] = left
                continue
            del here[block]
            if block in other:
                self._num_both[group] -= 1

    def change_hands(self, tables: Tables, *, leased: bool) -> None:
        """Move a request's tables to a lease, or back."""
        for group, table in enumerate(tables):
            self.hold(group, table.blocks, leased=leased)
            self.drop(group, table.blocks, leased=not leased)

    def num_used(self, group: int) -> int:
        return len(self._used[group])

    def num_leased(self, group: int) -> int:
        """Count the blocks that only leases hold."""
        return len(self._leased[group]) - self._num_both[group]

    def check(self, used: Iterable[Tables], leased: Iterable[Tables]) -> None:
        """Assert that the counts match these tables."""
        again = BlockUsage(len(self._used))
        for sides, is_leased in ((used, False), (leased, True)):
            for tables in sides:
                for group, table in enumerate(tables):
                    again.hold(group, table.blocks, leased=is_leased)
        assert vars(again) == vars(self), "blocks are counted wrongly"

    def _sides(self, group: int, leased: bool) -> tuple[dict[int, int], dict[int, int]]:
        used, leases = self._used[group], self._leased[group]
        return (leases, used) if leased else (used, leases)
