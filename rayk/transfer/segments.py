"""Where the rows of a sequence are cut for a transfer. Pure.

Positions are cut wherever a block of either side ends: a segment lies in one block on both sides. The first
and the last segment may hold few live rows; `live_parts` says which rows around them are worth a cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from rayk.kv.geometry import GroupGeometry
from rayk.kv.groups import REFERENCE_BLOCK_SIZE

Ints = npt.NDArray[np.int64]

MAX_PARTS = 16
"""Segments are cut at this many places at most, so that requests of all lengths share a few patterns."""


def segment_starts(live: range, source_block_size: int, destination_block_size: int) -> Ints:
    """First positions of the segments that hold a live row: borders of either side's blocks, ascending."""
    if not live:
        return np.empty(0, dtype=np.int64)
    borders = [
        np.arange(live.start // size * size, live.stop, size, dtype=np.int64)
        for size in {source_block_size, destination_block_size}
    ]
    if len(borders) == 1:
        return borders[0]
    starts: Ints = np.unique(np.concatenate(borders))
    # Keep the last border at or before the first live row, and all after it.
    return starts[np.searchsorted(starts, live.start, side="right") - 1 :]


def rows_of(source: GroupGeometry, destination: GroupGeometry, starts: Ints) -> Ints:
    """[segments, 3]: first row in the source's block, in the destination's, and number of rows, of the
    segments that start at these positions."""
    here, there = starts % source.block_size, starts % destination.block_size
    # A segment ends where the first block ends.
    last = np.minimum(source.block_size - here, destination.block_size - there) - 1
    source_row, destination_row = here // source.tokens_per_row, there // destination.tokens_per_row
    num_rows = (here + last) // source.tokens_per_row - source_row + 1
    also = (there + last) // destination.tokens_per_row - destination_row + 1
    assert np.array_equal(num_rows, also), "a row stands for other tokens on the other side"
    return np.stack([source_row, destination_row, num_rows], axis=1)


def live_parts(source: GroupGeometry, starts: Ints, rows: Ints, live: range) -> Ints:
    """[segments, 2]: first row, counted in the segment, and the one after the last, of the part that holds
    the live rows; all rows where all are live. `starts`, `rows`: of segments that hold a live row.

    Parts end at multiples of a sixteenth of the segment, and of a block as it was before it grew.
    """
    source_row, num_rows = rows[:, 0], rows[:, 2]
    offsets = np.maximum(live.start - starts, 0), live.stop - 1 - starts
    first, last = (
        (starts % source.block_size + offset) // source.tokens_per_row - source_row for offset in offsets
    )
    quantum = REFERENCE_BLOCK_SIZE * -(-num_rows // (MAX_PARTS * REFERENCE_BLOCK_SIZE))
    stop = np.minimum((last // quantum + 1) * quantum, num_rows)
    return np.stack([first // quantum * quantum, stop], axis=1)


def ending_in(
    among: range, source: GroupGeometry, destination: GroupGeometry, starts: Ints, live: range
) -> Ints:
    """Of the segments that start at these positions and hold live rows, those whose last live row is one of
    `among`."""
    here, there = starts % source.block_size, starts % destination.block_size
    ends = starts + np.minimum(source.block_size - here, destination.block_size - there)
    last = np.minimum(ends, live.stop) - 1
    kept: Ints = starts[(last >= among.start) & (last < among.stop)]
    return kept


def shared_segments(starts_of: Mapping[range, Ints]) -> Iterator[tuple[tuple[range, ...], Ints]]:
    """(live rows of some layers, starts of the segments that hold live rows of just these): each segment that
    starts at one of `starts_of` once. Borders of blocks are the same, however many rows live."""
    lives = tuple(starts_of)
    assert len(lives) < 63, "a bit for each"
    starts = np.unique(np.concatenate(list(starts_of.values())))
    members = np.zeros(len(starts), dtype=np.int64)
    for bit, live in enumerate(lives):
        members |= np.isin(starts, starts_of[live]).astype(np.int64) << bit
    for code in np.unique(members).tolist():
        chosen = tuple(live for bit, live in enumerate(lives) if code >> bit & 1)
        yield chosen, starts[members == code]
