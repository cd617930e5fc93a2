"""Which blocks hold the KV of which tokens, whoever computed it: what a prompt shares with an earlier one.

A block is known by its group and by all tokens up to its end. It is named when its last token is computed,
from when on nobody writes into it; a block of states holds the state at its end then. A sequence may go on
from n cached tokens where n is a whole number of blocks in every group and all blocks that are live at n are
there: all of full attention, those of the last window, of the current chunk, the one that ends with the
state. Blocks before these need not exist any more.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence

from rayk.kv.groups import KVCacheGroup

DIGEST_BYTES = 32
"""Equal digests of so many bytes mean equal tokens: nobody finds two sequences that share one."""
_SECRET = secrets.token_bytes(32)
"""Of this process: nobody who chooses prompts can tell digests."""

Wanted = Callable[[KVCacheGroup, int], range | None]
"""Of a group and a number of tokens: the blocks, by position in the table, that must be cached to go on from
there; None where one cannot."""


class PrefixKeys:
    """Digests of the prefixes of one sequence that end where blocks do. It grows at its end only."""

    def __init__(self, block_sizes: Iterable[int]) -> None:
        self._sizes = tuple(block_sizes)
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES, key=_SECRET)
        self._num_hashed = 0
        self._keys: dict[int, bytes] = {}

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Know the prefixes of up to `num_tokens` of these tokens: those of earlier calls, and more."""
        while True:
            end = min(self._num_hashed // size * size + size for size in self._sizes)
            if end > num_tokens:
                return
            self._hash.update(array("i", token_ids[self._num_hashed : end]).tobytes())
            self._keys[end] = self._hash.digest()
            self._num_hashed = end

    def __getitem__(self, num_tokens: int) -> bytes:
        return self._keys[num_tokens]


class PrefixCache:
    """Key -> block, per group. Whether blocks are held, and which are lost next, is the pool's business."""

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self._groups = tuple(groups)
        self._blocks: list[dict[bytes, int]] = [{} for _ in groups]
        self._names: dict[int, tuple[int, bytes]] = {}
        """Block -> its group and key."""

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, block: object) -> bool:
        return block in self._names

    @property
    def unit_tokens(self) -> int:
        """What every hit is a multiple of: blocks of all groups end there."""
        return math.lcm(*(g.spec.block_size for g in self._groups))

    def make_keys(self) -> PrefixKeys:
        """Of a new sequence."""
        return PrefixKeys({g.spec.block_size for g in self._groups})

    def put(self, group: int, key: bytes, block: int) -> bool:
        """Remember a block; False where another one holds the same."""
        if self._blocks[group].setdefault(key, block) != block:
            return False
        self._names[block] = group, key
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """These are handed out for something else."""
        for block in blocks:
            group, key = self._names.pop(block)
            del self._blocks[group][key]

    def blocks(self, group: int, keys: PrefixKeys, wanted: range) -> list[int]:
        """The blocks at these positions of a table, as far as they are cached without a gap."""
        size, known = self._groups[group].spec.block_size, self._blocks[group]
        found: list[int] = []
        for index in wanted:
            block = known.get(keys[(index + 1) * size])
            if block is None:
                break
            found.append(block)
        return found

    def longest(
        self,
        keys: PrefixKeys,
        max_tokens: int,
        unit_tokens: int,
        wanted: Wanted,
        nothing_until: Callable[[KVCacheGroup], int] = lambda group: 0,
    ) -> int:
        """The largest multiple of `unit_tokens`, up to `max_tokens`, at which all wanted blocks are cached.

        `keys` reach as far. More tokens want all blocks that fewer want, but for those at the beginning.
        `nothing_until`: so many tokens of a group and fewer want no block.
        """
        found: dict[int, range] = {}
        n = max_tokens // unit_tokens * unit_tokens
        while n > 0:
            shorter = n
            for g in self._groups:
                fits = self._fits(g, keys, n, wanted, found)
                shorter = min(shorter, n if fits == n else max(fits, nothing_until(g)))
            if shorter == n:
                return n
            n = min(n - unit_tokens, shorter // unit_tokens * unit_tokens)
        return 0

    def _fits(
        self, group: KVCacheGroup, keys: PrefixKeys, n: int, wanted: Wanted, found: dict[int, range]
    ) -> int:
        """`n` where the group has all it takes, else fewer tokens: no number in between can do. `found`: what
        was looked up before, by group."""
        blocks = wanted(group, n)
        if blocks is None:
            return n - 1
        before = found.get(group.index, range(0))
        if not blocks or (blocks.start >= before.start and blocks.stop <= before.stop):
            return n
        num_found = len(self.blocks(group.index, keys, blocks))
        found[group.index] = range(blocks.start, blocks.start + num_found)
        return n if num_found == len(blocks) else found[group.index].stop * group.spec.block_size
