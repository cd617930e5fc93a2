"""Which stretches of a block a staged read moves, and where its runs lie in them. Pure; free of torch.

Runs get small where the two sides order heads and tokens unlike (one per token and head), though together
they are much of a block. A staged read moves **extents**: the runs' intervals in the source, joined over gaps
that cost less than a descriptor. In the staging buffer extent e of a chunk of n blocks is an area of its own,
block after block, so that consecutive source blocks still join; copies then bring each run into its page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from rayk.transfer.plan import Pattern

Ints = npt.NDArray[np.int64]

AREA_ALIGNMENT = 64
"""Areas start at multiples of so many bytes."""
WORD_BYTES = 16
"""Bytes keep their offset modulo this, so that copies out of the buffer go in words as wide as the runs'."""


@dataclass(frozen=True, eq=False)
class Extents:
    """Some extents of a block and the runs inside them; int64 [extents] or [runs], bytes."""

    starts: Ints
    """First bytes in block 0 of the source."""
    lengths: Ints
    strides: Ints
    """Bytes from block to block of the source."""
    run_extents: Ints
    """The extent of each run."""
    run_offsets: Ints
    """Where it begins in there."""
    run_lengths: Ints
    destinations: Ints
    """First bytes in block 0 of the destination."""
    destination_strides: Ints

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_runs(self) -> int:
        """Copies a block."""
        return len(self.run_lengths)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes read per block, gaps included."""
        return int(self.lengths.sum())

    @cached_property
    def run_bytes(self) -> int:
        """Bytes copied per block."""
        return int(self.run_lengths.sum())

    @property
    def shifts(self) -> Ints:
        """Where in its area each extent begins."""
        shifts: Ints = self.starts % WORD_BYTES
        return shifts

    @property
    def is_dense(self) -> npt.NDArray[np.bool_]:
        """Extents that fill their blocks: consecutive blocks join."""
        dense: npt.NDArray[np.bool_] = self.lengths == self.strides
        return dense

    @cached_property
    def num_dense(self) -> int:
        """How many of them do."""
        return int(self.is_dense.sum())

    @property
    def staged_strides(self) -> Ints:
        """Bytes from block to block in the staging buffer."""
        rounded = -(-self.lengths // WORD_BYTES) * WORD_BYTES
        strides: Ints = np.where(self.is_dense, self.lengths, rounded)
        return strides

    def areas(self, num_blocks: int) -> tuple[Ints, int]:
        """Compute (first byte of each area, bytes of all) of a chunk of blocks."""
        sizes = self.shifts + self.staged_strides * num_blocks
        ends = np.cumsum(-(-sizes // AREA_ALIGNMENT) * AREA_ALIGNMENT)
        return np.concatenate([[0], ends[:-1]]).astype(np.int64), int(ends[-1])

    def max_blocks(self, num_bytes: int) -> int:
        """Count the blocks of the largest chunk that takes no more bytes than these; 0 where none fits."""
        return self._most(num_bytes)

    @cached_property
    def _most(self) -> Callable[[int], int]:
        # Asked for every request, of one buffer.
        return lru_cache(maxsize=2)(self._max_blocks)

    def _max_blocks(self, num_bytes: int) -> int:
        fixed = int((self.shifts + AREA_ALIGNMENT).sum())
        guess = max(0, num_bytes - fixed) // int(self.staged_strides.sum())
        # A chunk of one may fit where rounding up to whole areas was too careful.
        return guess or int(self.areas(1)[1] <= num_bytes)


def make_extents(pattern: Pattern, gap_bytes: int, max_bytes: int) -> tuple[Extents, ...] | None:
    """Return all runs of a pattern, in as few parts as have a block each that fits into `max_bytes`.

    None where a run alone does not fit. Runs are joined over gaps of at most `gap_bytes`.
    """
    runs = pattern.runs
    if len(runs) == 0 or int(runs.lengths.max()) + WORD_BYTES + AREA_ALIGNMENT > max_bytes:
        return None
    order = np.argsort(runs.source, kind="stable")
    source, lengths = runs.source[order], runs.lengths[order]
    strides = pattern.source_strides[order]
    ends = np.maximum.accumulate(source + lengths)
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = (source[1:] - ends[:-1] > gap_bytes) | (strides[1:] != strides[:-1])
    # No further than to where the next block begins: NIXL takes no strides below the length.
    limits = np.minimum(strides, max_bytes - WORD_BYTES - AREA_ALIGNMENT)
    _cut_long(opens, source, ends, limits)
    first = np.flatnonzero(opens)
    starts = source[first]
    stops = np.maximum.reduceat(source + lengths, first)
    return tuple(
        _part(pattern, order, np.cumsum(opens) - 1, starts, stops - starts, strides[first], chosen)
        for chosen in _parts(starts, stops, max_bytes)
    )


def _cut_long(opens: npt.NDArray[np.bool_], source: Ints, ends: Ints, limits: Ints) -> None:
    """Begin another extent before a run that would make its own longer than allowed, by run. In place."""
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(opens)) - 1
    is_long = ends[last] - source[first] > limits[first]
    for begin, end in zip(first[is_long].tolist(), last[is_long].tolist(), strict=True):
        start, max_bytes = begin, limits[begin]
        for run in range(begin + 1, end + 1):
            if ends[run] - source[start] > max_bytes:
                opens[run] = True
                start = run


def _parts(starts: Ints, stops: Ints, max_bytes: int) -> Iterator[range]:
    """Neighbouring extents that fit into the buffer together."""
    begin, used = 0, 0
    for i, size in enumerate((stops - starts).tolist()):
        needed = -(-(size + 2 * WORD_BYTES) // AREA_ALIGNMENT) * AREA_ALIGNMENT
        if used + needed > max_bytes and i > begin:
            yield range(begin, i)
            begin, used = i, 0
        used += needed
    yield range(begin, len(starts))


def _part(
    pattern: Pattern, order: Ints, extent_of: Ints, starts: Ints, lengths: Ints, strides: Ints, chosen: range
) -> Extents:
    """`order`: runs by source; `extent_of` each of them in that order."""
    here = order[(extent_of >= chosen.start) & (extent_of < chosen.stop)]
    # Pages are written from front to back.
    here = here[np.argsort(pattern.runs.destination[here], kind="stable")]
    extent_of_run = np.empty(len(order), dtype=np.int64)
    extent_of_run[order] = extent_of
    extents = extent_of_run[here]
    part = slice(chosen.start, chosen.stop)
    return Extents(
        starts=starts[part],
        lengths=lengths[part],
        strides=strides[part],
        run_extents=extents - chosen.start,
        run_offsets=pattern.runs.source[here] - starts[extents],
        run_lengths=pattern.runs.lengths[here],
        destinations=pattern.runs.destination[here],
        destination_strides=pattern.destination_strides[here],
    )
