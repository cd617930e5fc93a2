"""Where the rows of a sequence are cut for a transfer. Pure.

Positions are cut wherever a block of either side ends: a segment lies in one block on both sides. Segments
are numbered from the sequence's first token on, and those a request moves are a range of these numbers. The
first and the last of them may hold few live rows; `Segments.kind` says which rows around these are worth
moving along.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayk.kv.geometry import GroupGeometry
from rayk.kv.groups import REFERENCE_BLOCK_SIZE

Ints = npt.NDArray[np.int64]

MAX_PARTS = 16
"""Segments are cut at this many places at most, so that requests of all lengths share a few patterns."""


class Kind(NamedTuple):
    """What a segment is, wherever its blocks lie; rows are those of one unit and layer."""

    source_row: int
    """First row in the source block."""
    destination_row: int
    num_rows: int
    first: int
    """First row, counted in the segment, of the part that holds the live ones."""
    stop: int
    """One behind its last."""


class CopySegments:
    """Segments repeat after a period of both block sizes."""

    def __init__(self, source: GroupGeometry, destination: GroupGeometry) -> None:
        self._sizes = source.block_size, destination.block_size
        self._tokens_per_row = source.tokens_per_row, destination.tokens_per_row
        self._period = math.lcm(*self._sizes)
        self.per_period = self._at(self._period)

    def holding(self, live: range) -> range:
        """Return those that hold a live row."""
        return range(self._at(live.start), self._at(live.stop - 1) + 1) if live else range(0)

    def ending_in(self, among: range, found: range, live: range) -> range:
        """Return those of `found`, all of which hold live rows, whose last live row is one of `among`."""
        if among.start >= live.stop:
            return range(0)
        stop = found.stop if among.stop >= live.stop else min(found.stop, self._at(among.stop))
        return range(max(found.start, self._at(among.start)), stop)

    def starts(self, found: range) -> range | Ints:
        """List the first positions of these segments."""
        size = self._sizes[0]
        if self.per_period == 1:
            return range(found.start * size, found.stop * size, size)
        first, last = self._start(found[0]), self._start(found[-1])
        borders = [np.arange(-(-first // n) * n, last + 1, n, dtype=np.int64) for n in self._sizes]
        return np.unique(np.concatenate(borders))

    def blocks(self, starts: range | Ints) -> tuple[slice | Ints, slice | Ints]:
        """Tell where the blocks of segments with these first positions stand in the tables of both sides."""
        if isinstance(starts, range):
            here = slice(starts.start // starts.step, starts.stop // starts.step)
            return here, here
        return starts // self._sizes[0], starts // self._sizes[1]

    def kind(self, start: int, live: range) -> Kind:
        """Say how the segment that starts here, and holds a live row, is moved: whole where all of it is
        live; else parts end at multiples of a sixteenth of it, and of a block as it was before it grew."""
        here, there = start % self._sizes[0], start % self._sizes[1]
        # A segment ends where the first block ends.
        end = min(self._sizes[0] - here, self._sizes[1] - there) - 1
        source_row, destination_row = here // self._tokens_per_row[0], there // self._tokens_per_row[1]
        num_rows = (here + end) // self._tokens_per_row[0] - source_row + 1
        also = (there + end) // self._tokens_per_row[1] - destination_row + 1
        assert num_rows == also, "a row stands for other tokens on the other side"
        first = (here + max(live.start - start, 0)) // self._tokens_per_row[0] - source_row
        last = (here + live.stop - 1 - start) // self._tokens_per_row[0] - source_row
        quantum = REFERENCE_BLOCK_SIZE * -(-num_rows // (MAX_PARTS * REFERENCE_BLOCK_SIZE))
        stop = min((last // quantum + 1) * quantum, num_rows)
        return Kind(source_row, destination_row, num_rows, first // quantum * quantum, stop)

    def _at(self, position: int) -> int:
        """Return the segment that holds a position: as many borders lie before it."""
        return sum(position // size for size in self._sizes) - position // self._period

    def _start(self, number: int) -> int:
        """Tell where a segment starts: no later than if each were as long as it can be."""
        return bisect_left(range(number * min(self._sizes)), number, key=self._at)


def shared_segments(found: Mapping[range, range]) -> Iterator[tuple[tuple[range, ...], range]]:
    """`found`: live rows of some layers -> the segments that hold them. (live rows of some layers, segments
    that hold live rows of just these): each segment once."""
    if len(found) == 1:
        ((live, segments),) = found.items()
        if segments:
            yield (live,), segments
        return
    borders = sorted({border for segments in found.values() for border in (segments.start, segments.stop)})
    for first, stop in pairwise(borders):
        chosen = tuple(live for live, segments in found.items() if first in segments)
        if chosen:
            yield chosen, range(first, stop)
