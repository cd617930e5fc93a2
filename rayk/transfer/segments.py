"""Where the rows of a sequence are cut for a transfer. Pure.

Positions are cut wherever a block of either side ends: a segment lies in one block on both sides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayk.kv.geometry import GroupGeometry

Ints = npt.NDArray[np.int64]


def segment_starts(live: range, source_block_size: int, destination_block_size: int) -> Ints:
    """First positions of the segments that hold a live row: borders of either side's blocks, ascending."""
    if not live:
        return np.empty(0, dtype=np.int64)
    borders = [
        np.arange(live.start // size * size, live.stop, size, dtype=np.int64)
        for size in {source_block_size, destination_block_size}
    ]
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
