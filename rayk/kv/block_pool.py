"""The pool of block ids shared by all KV groups of an engine. Ids only: no bytes here."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from rayk.kv.free_runs import FreeRuns
from rayk.types.errors import OutOfBlocks

NULL_BLOCK = 0
"""Id that is never handed out: in block tables it stands for unneeded blocks, e.g. outside a window."""
SPARE_BLOCKS = 32
"""To find a consecutive run, `allocate` looks at up to this many (or a sixteenth of the pool, if less) more
of the oldest cached blocks than it needs."""


class BlockPool:
    """Hands out block ids, preferring consecutive ones (they coalesce into longer transfer runs).

    A freed block may keep its content for later prefix hits until it is handed out again. Blocks without
    content go first, then the least recently freed. Calls cost at most the logarithm of the pool's size per
    block.
    """

    def __init__(self, num_blocks: int, on_lost: Callable[[Sequence[int]], None] | None = None) -> None:
        """`on_lost` is called with cached blocks that are handed out again."""
        assert num_blocks >= 2, "a null block and at least one other"
        self.num_blocks = num_blocks
        self._on_lost = on_lost
        self._blank = FreeRuns(num_blocks)
        """Free blocks without content."""
        self._blank.add(NULL_BLOCK + 1, num_blocks - 1)
        self._oldest: OrderedDict[int, None] = OrderedDict()
        """Free blocks with content, least recently freed first."""
        self._references = array("q", bytes(8 * num_blocks))
        self._kept = bytearray(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank) + len(self._oldest)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._oldest)

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Take blocks, each with one reference; ids following `after` first, then the first run that fits.

        Raises OutOfBlocks and changes nothing when there are too few.
        """
        if num_blocks == 1 and self._blank:  # a request that decodes
            block = self._blank.take(None if after is None else after + 1)
            self._references[block] = 1
            return [block]
        if self.num_free_blocks < num_blocks:
            raise OutOfBlocks(num_blocks, self.num_free_blocks)
        if not num_blocks:
            return []
        if len(self._blank) < num_blocks:
            taken = self._take_oldest(num_blocks, after)
        elif (start := self._first_blank(num_blocks, after)) is not None:
            self._blank.remove(start, num_blocks)
            taken = list(range(start, start + num_blocks))
        else:
            taken = self._blank.take_lowest(num_blocks)
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, which must be in use or keep its content."""
        for block in block_ids:
            assert self._references[block] > 0 or self._kept[block], f"block {block} is not in use"
            if not self._references[block]:
                del self._oldest[block]
            self._references[block] += 1

    def keep(self, block_id: int) -> None:
        """Mark the block so that its content stays findable after it is freed."""
        assert self._references[block_id] > 0, f"block {block_id} is not in use"
        self._kept[block_id] = 1

    def forget(self, block_id: int) -> None:
        """Drop the block's content: it is not findable any more."""
        self._kept[block_id] = 0
        if block_id in self._oldest:
            del self._oldest[block_id]
            self._blank.add(block_id, 1)

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference of each block; null blocks are skipped. Of cached blocks the last are reused
        first, since the beginning of a sequence is shared more often."""
        references, kept, blank = self._references, self._kept, []
        for block in reversed(tuple(block_ids)):
            if block == NULL_BLOCK:
                continue
            left = references[block] - 1
            assert left >= 0, f"block {block} freed twice"
            references[block] = left
            if left:
                continue
            if kept[block]:
                self._oldest[block] = None
            else:
                blank.append(block)
        self._blank.add_all(blank)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def is_kept(self, block_id: int) -> bool:
        return bool(self._kept[block_id])

    def check_integrity(self) -> None:
        """Assert that every block but the null block is either free or referenced."""
        free = {b for b in range(self.num_blocks) if b in self._blank or b in self._oldest}
        used = {b for b, holders in enumerate(self._references) if holders > 0}
        assert NULL_BLOCK not in free, "the null block was freed"
        assert not self._kept[NULL_BLOCK], "the null block holds nothing"
        assert self._references[NULL_BLOCK] == 0, "the null block was allocated"
        assert not used & free, "a referenced block is free"
        assert min(self._references) >= 0, "negative references"
        assert len(used) + self.num_free_blocks == self.num_blocks - 1, "blocks leaked"
        assert len(free) == self.num_free_blocks, "a free block is counted twice"
        assert all(bool(self._kept[b]) == (b in self._oldest) for b in free), (
            "a free block is in the wrong list"
        )

    def _first_blank(self, num_blocks: int, after: int | None) -> int | None:
        """Start of a run of `num_blocks` blocks without content, right after `after` if possible; None if
        there is no such run."""
        if after is not None and self._blank.holds(after + 1, num_blocks):
            return after + 1
        return self._blank.first(num_blocks)

    def _take_oldest(self, num_blocks: int, after: int | None) -> list[int]:
        """Take blocks without content and, because there are too few, the oldest cached ones."""
        blank = self._blank.take_lowest(num_blocks)
        spare = min(SPARE_BLOCKS, self.num_blocks // 16)
        candidates = blank + list(islice(self._oldest, num_blocks - len(blank) + spare))
        taken = _find_run(sorted(candidates), num_blocks, after) or candidates[:num_blocks]
        self._blank.add_all(set(blank).difference(taken))
        lost = [block for block in taken if self._kept[block]]
        for block in lost:
            del self._oldest[block]
            self._kept[block] = 0
        if lost and self._on_lost is not None:
            self._on_lost(lost)
        return taken


def _find_run(free: Sequence[int], num_blocks: int, after: int | None) -> list[int] | None:
    """Return a run of `num_blocks` consecutive ids among these ascending ones, or None. A single block is a
    run only if it follows `after`."""
    ids = np.array(free, dtype=np.int64)
    # ids[i + n - 1] - ids[i] == n - 1 exactly where n consecutive ids start at i.
    spans = ids[num_blocks - 1 :] - ids[: len(ids) - num_blocks + 1]
    starts: list[int] = ids[np.flatnonzero(spans == num_blocks - 1)].tolist()
    if after is not None and after + 1 in starts:
        start = after + 1
    elif starts and num_blocks > 1:
        start = starts[0]
    else:
        return None
    return list(range(start, start + num_blocks))
