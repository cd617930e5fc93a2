"""The pool of block ids shared by all KV groups of an engine. Ids only: no bytes here."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rayk.types.errors import OutOfBlocks

NULL_BLOCK = 0
"""Never handed out: stands in block tables for blocks that need not exist (outside a window)."""


class BlockPool:
    """Hands out block ids, preferring consecutive ones (they coalesce into longer transfer runs)."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a null block and at least one other"
        self.num_blocks = num_blocks
        self._free = np.ones(num_blocks, dtype=bool)
        self._free[NULL_BLOCK] = False
        self._references = np.zeros(num_blocks, dtype=np.int64)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return int(self._free.sum())

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Take blocks, each with one reference; ids following `after` first, then the first run that fits.

        Raises OutOfBlocks and changes nothing when there are too few.
        """
        free = np.flatnonzero(self._free)
        if len(free) < num_blocks:
            raise OutOfBlocks(num_blocks, len(free))
        taken = self._choose(free, num_blocks, after)
        self._free[taken] = False
        self._references[taken] = 1
        return [int(b) for b in taken]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in block_ids:
            assert self._references[block] > 0, f"block {block} is not in use"
            self._references[block] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference of each block; null blocks are passed over."""
        for block in block_ids:
            if block == NULL_BLOCK:
                continue
            assert self._references[block] > 0, f"block {block} freed twice"
            self._references[block] -= 1
            self._free[block] = self._references[block] == 0

    def references(self, block_id: int) -> int:
        """How many holders a block has."""
        return int(self._references[block_id])

    def check_integrity(self) -> None:
        """Every block is free or referenced, the null block neither. AssertionError otherwise."""
        assert not self._free[NULL_BLOCK], "the null block was freed"
        assert self._references[NULL_BLOCK] == 0, "the null block was allocated"
        used = self._references > 0
        assert not np.any(used & self._free), "a referenced block is free"
        assert np.all(self._references >= 0), "negative references"
        assert int(used.sum()) + self.num_free_blocks == self.num_blocks - 1, "blocks leaked"

    def _choose(self, free: np.ndarray, num_blocks: int, after: int | None) -> np.ndarray:
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
        return free[:num_blocks]
