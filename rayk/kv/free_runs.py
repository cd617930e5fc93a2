"""Free block ids, kept as runs of consecutive ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

NEAR = 4096
"""The lowest id is looked for among so many first ones before it is in the tree, which takes longer."""


class FreeRuns:
    """A set of ids below `num_ids`, empty at first, that finds the first run of a given length without a
    scan.

    It is a binary tree over the ids: the leaf of a run's first id holds the run's length, other leaves 0, and
    inner nodes the maximum of their children. Calls cost O(ids changed * log num_ids).
    """

    def __init__(self, num_ids: int) -> None:
        self._num_leaves = 1 << num_ids.bit_length()
        self._longest = array("q", bytes(8 * 2 * self._num_leaves))
        """Node 1 is the root; node i has the children 2 * i and 2 * i + 1."""
        self._is_in = bytearray(num_ids + 1)
        self._start_of = array("q", bytes(8 * num_ids))
        """First id of a run, valid at the run's last id only."""
        self._num_in = 0

    def __len__(self) -> int:
        return self._num_in

    def __contains__(self, block: int) -> bool:
        return bool(self._is_in[block])

    def holds(self, start: int, count: int) -> bool:
        """Tell whether all ids from `start` to `start + count - 1` are free."""
        return self._is_in[start : start + count] == b"\1" * count

    def add(self, start: int, count: int) -> None:
        """Add the ids from `start` on, none of which may be present."""
        self._is_in[start : start + count] = b"\1" * count
        self._num_in += count
        joined = stop = start + count
        if self._is_in[stop]:
            stop += self._longest[self._num_leaves + stop]
        if start and self._is_in[start - 1]:
            start = self._start_of[start - 1]
        # The longer one first: what it is joined with is then seldom the most of anything.
        self._set(start, stop - start)
        if stop > joined:
            self._set(joined, 0)
        self._start_of[stop - 1] = start

    def add_all(self, blocks: Iterable[int]) -> None:
        """Add ids given in any order, none of which may be present or repeated."""
        start = stop = 0
        for block in sorted(blocks):
            if block != stop:
                if stop > start:
                    self.add(start, stop - start)
                start = block
            stop = block + 1
        if stop > start:
            self.add(start, stop - start)

    def remove(self, start: int, count: int) -> None:
        """Remove the ids from `start` on, all of which must be present."""
        # Callers that continue their own ids, or ask `first`, start at the beginning of a run.
        is_first = start == 0 or not self._is_in[start - 1]
        first = start if is_first else self._is_in.rfind(0, 0, start) + 1
        stop = first + self._longest[self._num_leaves + first]
        self._is_in[start : start + count] = bytes(count)
        self._num_in -= count
        # What is left first: the run is then seldom the only one of its length, so that little changes.
        if stop > start + count:
            self._set(start + count, stop - start - count)
            self._start_of[stop - 1] = start + count
        self._set(first, start - first)
        if start > first:
            self._start_of[start - 1] = first

    def first(self, count: int) -> int | None:
        """Start of the first run of at least `count` ids, or None."""
        if self._longest[1] < count:
            return None
        node = 1
        while node < self._num_leaves:
            node *= 2
            if self._longest[node] < count:
                node += 1
        return node - self._num_leaves

    def take(self, wanted: int | None) -> int:
        """Remove and return this id if it is here, else the lowest; there is one."""
        found = wanted
        if found is None or not self._is_in[found]:
            found = self._lowest()
        if found and self._is_in[found - 1]:
            self.remove(found, 1)
            return found
        # The first of a run, nearly always: the run begins one later. Neighbours share the nodes above them.
        leaf = self._num_leaves + found
        num_left = self._longest[leaf] - 1
        self._is_in[found] = 0
        self._num_in -= 1
        if num_left:
            self._start_of[found + num_left] = found + 1
            if not found % 2:
                self._longest[leaf] = 0
            self._set(found + 1, num_left)
        if found % 2 or not num_left:
            self._set(found, 0)
        return found

    def _lowest(self) -> int:
        found = self._is_in.find(1, 0, NEAR)
        if found < 0:
            first = self.first(1)
            assert first is not None, "none is left"
            return first
        return found

    def take_lowest(self, count: int) -> list[int]:
        """Remove and return the lowest `count` ids, or all if there are fewer."""
        taken: list[int] = []
        while len(taken) < count and (start := self.first(1)) is not None:
            length = min(count - len(taken), self._longest[self._num_leaves + start])
            self.remove(start, length)
            taken += range(start, start + length)
        return taken

    def _set(self, start: int, length: int) -> None:
        """Set the length of the run that starts here; 0 if none does any more."""
        longest = self._longest
        node = self._num_leaves + start
        longest[node] = most = length
        while node > 1:
            if (beside := longest[node ^ 1]) > most:
                most = beside
            node >>= 1
            if longest[node] == most:
                return
            longest[node] = most
