"""The pool of block ids shared by all KV groups of an engine. Ids only: no bytes here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rayk.types.errors import OutOfBlocks

NULL_BLOCK = 0
"""Never handed out: stands in block tables for blocks that need not exist (outside a window)."""
SPARE_BLOCKS = 32
"""So many more of the oldest kept blocks than are needed may be chosen from, or a sixteenth of the pool where
that is less, so that those taken are consecutive where that can be had."""

Ints = npt.NDArray[np.int64]


class BlockPool:
    """Hands out block ids, preferring consecutive ones (they coalesce into longer transfer runs).

    A block that nobody holds may keep its content, so that it can be found again, until it is handed out:
    those without any go first, then those that were held longest ago.
    """

    def __init__(self, num_blocks: int, on_lost: Callable[[Sequence[int]], None] | None = None) -> None:
        """`on_lost` is told of kept blocks that are handed out: their content is about to go."""
        assert num_blocks >= 2, "a null block and at least one other"
        self.num_blocks = num_blocks
        self._on_lost = on_lost
        self._free = np.ones(num_blocks, dtype=bool)
        self._free[NULL_BLOCK] = False
        self._references = np.zeros(num_blocks, dtype=np.int64)
        self._kept = np.zeros(num_blocks, dtype=bool)
        self._freed_at = np.zeros(num_blocks, dtype=np.int64)
        """When each was last given back, counted in blocks given back."""
        self._clock = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return int(self._free.sum())

    @property
    def num_cached_blocks(self) -> int:
        """Of these, blocks whose content can still be found."""
        return int(np.count_nonzero(self._free & self._kept))

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Take blocks, each with one reference; ids following `after` first, then the first run that fits.

        Raises OutOfBlocks and changes nothing when there are too few.
        """
        free = np.flatnonzero(self._free)
        if len(free) < num_blocks:
            raise OutOfBlocks(num_blocks, len(free))
        candidates = self._first_to_go(free, num_blocks)
        taken = self._find_run(candidates, num_blocks, after)
        if taken is None:
            taken = self._oldest(candidates, num_blocks)
        self._free[taken] = False
        self._references[taken] = 1
        lost = taken[self._kept[taken]]
        if len(lost):
            self._kept[lost] = False
            if self._on_lost is not None:
                self._on_lost(lost.tolist())
        return [int(b) for b in taken]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, which somebody holds, or whose content was kept."""
        for block in block_ids:
            assert self._references[block] > 0 or self._kept[block], f"block {block} is not in use"
            self._references[block] += 1
            self._free[block] = False

    def keep(self, block_id: int) -> None:
        """Whoever gives this block back leaves its content to be found."""
        assert self._references[block_id] > 0, f"block {block_id} is not in use"
        self._kept[block_id] = True

    def forget(self, block_id: int) -> None:
        """Its content is not to be found any more, whoever holds it."""
        self._kept[block_id] = False

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference of each block; null blocks are passed over. Of kept ones the last go first: what
        comes early in a sequence is worth more."""
        for block in reversed(tuple(block_ids)):
            if block == NULL_BLOCK:
                continue
            assert self._references[block] > 0, f"block {block} freed twice"
            self._references[block] -= 1
            self._free[block] = self._references[block] == 0
            self._clock += 1
            self._freed_at[block] = self._clock

    def references(self, block_id: int) -> int:
        """How many holders a block has."""
        return int(self._references[block_id])

    def is_kept(self, block_id: int) -> bool:
        """Whether its content is to be found."""
        return bool(self._kept[block_id])

    def check_integrity(self) -> None:
        """Every block is free or referenced, the null block neither. AssertionError otherwise."""
        assert not self._free[NULL_BLOCK], "the null block was freed"
        assert not self._kept[NULL_BLOCK], "the null block holds nothing"
        assert self._references[NULL_BLOCK] == 0, "the null block was allocated"
        used = self._references > 0
        assert not np.any(used & self._free), "a referenced block is free"
        assert np.all(self._references >= 0), "negative references"
        assert int(used.sum()) + self.num_free_blocks == self.num_blocks - 1, "blocks leaked"

    def _first_to_go(self, free: Ints, num_blocks: int) -> Ints:
        """Those of the free blocks to choose from, ascending."""
        kept = self._kept[free]
        num_blank = len(free) - int(np.count_nonzero(kept))
        if num_blank >= num_blocks:
            return free if num_blank == len(free) else free[~kept]
        spare = min(SPARE_BLOCKS, self.num_blocks // 16)
        return np.sort(self._oldest(free, min(len(free), num_blocks + spare)))

    def _oldest(self, free: Ints, num_blocks: int) -> Ints:
        """Those without kept content, ascending, then those given back longest ago."""
        when = np.where(self._kept[free], self._freed_at[free], 0)
        return free[np.argsort(when, kind="stable")[:num_blocks]]

    @staticmethod
    def _find_run(free: Ints, num_blocks: int, after: int | None) -> Ints | None:
        """Consecutive ids; None where there are none."""
        if after is not None and num_blocks > 0:
            start = int(np.searchsorted(free, after + 1))
            run = free[start : start + num_blocks]
            if len(run) == num_blocks and run[0] == after + 1 and run[-1] == after + num_blocks:
                return run
        # free[i + n - 1] - free[i] == n - 1 exactly where n consecutive ids start at i.
        if num_blocks > 1:
            spans = free[num_blocks - 1 :] - free[: len(free) - num_blocks + 1]
            hits = np.flatnonzero(spans == num_blocks - 1)
            if len(hits):
                return free[hits[0] : hits[0] + num_blocks]
        return None
