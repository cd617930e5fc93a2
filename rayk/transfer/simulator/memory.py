"""Blocks of one life of an engine: who holds them, and what was written into them by whom.

A row holds no bytes but its provenance, so that right and wrong are told apart without any model: a right row
names request, layer, head and token. The pool is as nasty as it can be: a block that is given back is handed
to somebody else at once, its generation counted and its rows overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

BLOCK_SIZE = 4
HEADS = (0, 1)
NULL = 0
Row = tuple[object, ...]
FOREIGN: Row = ("somebody else's",)
UNWRITTEN: Row = ("never written",)
CORRUPT: Row = ("corrupt",)
Place = tuple[int, int, int]
"""(layer, head, block)."""


class Memory:
    """See the module."""

    def __init__(self, name: str, num_blocks: int, violate: Callable[[str], None]) -> None:
        """`violate` is told of what must not happen."""
        self.name = name
        self.generations = [0] * num_blocks
        self.holders: list[str | None] = [None] * num_blocks
        self.num_taken = 0
        self.num_freed = 0
        self._pages: dict[Place, list[Row]] = {}
        self._free = list(range(num_blocks - 1, NULL, -1))
        self._violate = violate

    @property
    def num_held(self) -> int:
        """Blocks that somebody has."""
        return self.num_taken - self.num_freed

    def take(self, holder: str, count: int) -> list[int] | None:
        """Blocks for a holder, as they were left; None when there are too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            assert self.holders[block] is None, f"{self.name}: block {block} is taken"
            self.holders[block] = holder
            self.generations[block] += 1
        self.num_taken += count
        return blocks

    def give(self, holder: str, blocks: Iterable[int]) -> None:
        """Blocks are needed no longer: somebody else has them at once, and fills them."""
        for block in blocks:
            if self.holders[block] != holder:
                self._violate(f"{self.name}: block {block} of {holder} was freed twice")
                continue
            self.holders[block] = None
            self.generations[block] += 1
            self.num_freed += 1
            self._free.insert(0, block)
            for layer in LAYERS:
                for head in HEADS:
                    self._pages[layer, head, block] = [FOREIGN] * BLOCK_SIZE

    def rows(self, layer: int, head: int, block: int) -> list[Row]:
        """What a page holds; not to be changed."""
        return self._pages.get((layer, head, block), _UNWRITTEN_PAGE)

    def write(self, holder: str, place: Place, first: int, rows: Sequence[Row]) -> None:
        """Rows from `first` on, by somebody who believes that the block is `holder`'s."""
        if self.holders[place[2]] != holder:
            owner = self.holders[place[2]] or "somebody else"
            self._violate(f"{self.name}: a write of {holder} into block {place[2]}, which is {owner}'s")
            return
        page = self._pages.get(place)
        if page is None:
            page = self._pages[place] = [UNWRITTEN] * BLOCK_SIZE
        page[first : first + len(rows)] = rows


LAYERS = (0, 1)
"""0: full attention. 1: something of which only what is live at the end is kept."""
_UNWRITTEN_PAGE = [UNWRITTEN] * BLOCK_SIZE
