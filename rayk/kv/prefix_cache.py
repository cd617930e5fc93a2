"""Finds the blocks that hold the KV of a token prefix.

A block's key is made from its group, all tokens up to its end and its request's cache salt. It is named once
its last token is computed, after which nobody writes into it; a state block then holds the state at its end.
A sequence may start from n cached tokens if n is a whole number of blocks in every group and all blocks that
are live at n are cached: all of full attention, the last window, the current chunk, the block that ends with
the state.

A block from elsewhere may hold only its last rows, and different ones for layers that see different rows (the
group's lanes). It has the same key, with the position from which each lane's rows are present. Draft layers
that ride on a group are a lane of it: a block may hold the model's rows and none of theirs. Where their rows
depend on the token after their own, a block's key does, too.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import KVCacheSpec
from rayk.types.cache_salt import salting

DIGEST_BYTES = 32
"""Long enough that equal digests mean equal tokens: nobody finds a collision."""
_SECRET = secrets.token_bytes(32)
"""This process's default secret, so that prompt authors cannot predict digests. Caches that are shared or
outlive the process bring their own."""

NeededRows = Callable[[KVCacheGroup, KVCacheSpec, int], range | None]
"""(group, lane, number of tokens) -> positions whose rows must be cached to go on from there, up to a block's
end; None if one cannot go on there."""
Since = tuple[int, ...]
"""Per lane, the position from which its rows are present."""
Elsewhere = Callable[[int, bytes], Since | None]
"""(group, key) -> per lane, the first row that another place has (empty: all); None: no such block."""


class PrefixKeys:
    """Digests of the prefixes of one growing sequence that end where blocks do."""

    def __init__(
        self,
        block_sizes: Iterable[int],
        secret: bytes | None = None,
        cache_salt: str | None = None,
        *,
        looks_ahead: bool = False,
    ) -> None:
        """`secret`: at most 64 bytes; equal secrets give equal keys everywhere. None: this process's.
        `looks_ahead`: a prefix has another key for each token that comes after it, and none before that is
        known."""
        self._sizes = tuple(block_sizes)
        self._looks_ahead = looks_ahead
        key = _SECRET if secret is None else secret
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, **salting(cache_salt))
        self.cache_salt = cache_salt
        self._num_hashed = 0
        self._keys: dict[int, bytes] = {}

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Compute the keys of prefixes of up to `num_tokens` tokens; these extend those of earlier calls."""
        while True:
            end = min(self._num_hashed // size * size + size for size in self._sizes)
            if end > num_tokens or (self._looks_ahead and end >= len(token_ids)):
                return
            self._hash.update(array("i", token_ids[self._num_hashed : end]).tobytes())
            found = self._hash
            if self._looks_ahead:
                found = found.copy()
                found.update(array("i", token_ids[end : end + 1]).tobytes())
            self._keys[end] = found.digest()
            self._num_hashed = end

    def __getitem__(self, num_tokens: int) -> bytes:
        return self._keys[num_tokens]

    def __contains__(self, num_tokens: object) -> bool:
        """Tell whether a block ends there, and the token after it is known where keys depend on that."""
        return num_tokens in self._keys

    def of_size(self, block_size: int) -> list[bytes]:
        """List keys of prefixes that end where a block of this size does."""
        return [key for end, key in self._keys.items() if end % block_size == 0]


class CachedPrefixes:
    """Key -> block, per group. The block pool decides which blocks are held and which are lost next."""

    def __init__(
        self, groups: Sequence[KVCacheGroup], secret: bytes | None = None, *, looks_ahead: bool = False
    ) -> None:
        self._groups = tuple(groups)
        self._looks_ahead = looks_ahead
        self._secret = secret
        self._blocks: list[dict[bytes, int]] = [{} for _ in groups]
        self._names: dict[int, tuple[int, bytes]] = {}
        """Block -> its group and key."""
        self._since: dict[int, Since] = {}
        """Block -> per lane, the first row it holds; 0 if it holds all."""

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, block: object) -> bool:
        return block in self._names

    @property
    def unit_tokens(self) -> int:
        """Every hit is a multiple of this: blocks of all groups end there."""
        return math.lcm(*(g.spec.block_size for g in self._groups))

    @property
    def named(self) -> tuple[int, ...]:
        return tuple(self._names)

    def find(self, group: int, key: bytes) -> int | None:
        return self._blocks[group].get(key)

    def since_of(self, block: int) -> Since:
        """Per lane, the first row that a cached block holds; 0 if it holds all."""
        return self._since[block]

    def make_keys(self, cache_salt: str | None = None) -> PrefixKeys:
        sizes = {g.spec.block_size for g in self._groups}
        return PrefixKeys(sizes, self._secret, cache_salt, looks_ahead=self._looks_ahead)

    def put(self, group: int, key: bytes, block: int, since: Since) -> bool:
        """Name a block; False if another block has this key."""
        if self._blocks[group].setdefault(key, block) != block:
            return False
        self._names[block] = group, key
        known = self._since.get(block)
        self._since[block] = since if known is None else tuple(map(min, known, since))
        return True

    def outdone(self, group: int, key: bytes, since: Since) -> int | None:
        """Return the block of this key if its rows are a proper subset of `since`'s, else None."""
        block = self._blocks[group].get(key)
        if block is None:
            return None
        known = self._since[block]
        is_less = known != since and all(a >= b for a, b in zip(known, since, strict=True))
        return block if is_less else None

    def holding(self, keys: PrefixKeys) -> set[int]:
        """It finds all cached blocks of a sequence, whoever computed them."""
        known = zip(self._groups, self._blocks, strict=True)
        found = (blocks.get(key) for g, blocks in known for key in keys.of_size(g.spec.block_size))
        return {block for block in found if block is not None}

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove blocks that are handed out again."""
        for block in blocks:
            group, key = self._names.pop(block)
            del self._blocks[group][key], self._since[block]

    def blocks(
        self,
        group: int,
        keys: PrefixKeys,
        needed: range,
        lane: int | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> list[int]:
        """Return the blocks of the needed positions up to the first that is not cached; with `lane`, they
        must hold that lane's rows. The null block stands for blocks that are only `elsewhere`."""
        size, known = self._groups[group].spec.block_size, self._blocks[group]
        found: list[int] = []
        for index in range(needed.start // size, needed.stop // size):
            key = keys[(index + 1) * size]
            block = known.get(key)
            first = max(needed.start, index * size)

            def lacks(since: Since, first: int = first) -> bool:
                return lane is not None and bool(since) and since[lane] > first

            if block is not None and lacks(self._since[block]):
                block = None
            if block is None:
                since = None if elsewhere is None else elsewhere(group, key)
                if since is None or lacks(since):
                    break
                block = NULL_BLOCK
            found.append(block)
        return found

    def since(self, group: int, blocks: Sequence[int], filled: Mapping[int, Since] | None = None) -> Since:
        """Per lane, the first row present in a table of these blocks, of which the first may be null.
        `filled`: by position, the rows of blocks that have no name yet (empty: all)."""
        size, whole = self._groups[group].spec.block_size, (0,) * len(self._groups[group].lanes)
        found = []
        for lane in range(len(whole)):
            index = len(blocks)
            start = index * size
            while index > 0 and start == index * size and blocks[index - 1] != NULL_BLOCK:
                index -= 1
                known = (filled or {}).get(index, self._since.get(blocks[index])) or whole
                start = known[lane] or index * size
            found.append(start)
        return tuple(found)

    def longest(
        self,
        keys: PrefixKeys,
        max_tokens: int,
        unit_tokens: int,
        needed: NeededRows,
        nothing_until: Callable[[KVCacheSpec], int] = lambda lane: 0,
        elsewhere: Elsewhere | None = None,
        *,
        drafts: bool = True,
    ) -> int:
        """Return the largest multiple of `unit_tokens`, up to `max_tokens`, at which all needed rows are
        cached or `elsewhere`; without `drafts`, those of draft layers may lack.

        `keys` must reach that far. A longer prefix wants all rows of a shorter one except some at the
        beginning. `nothing_until(lane)`: a prefix of at most this many tokens wants no row.
        """
        found: dict[tuple[int, int], range] = {}
        lanes = [
            (g, lane, index)
            for g in self._groups
            for index, lane in enumerate(g.lanes if drafts else g.own_lanes)
        ]
        n = max_tokens // unit_tokens * unit_tokens
        while n > 0:
            shorter = n
            for g, lane, index in lanes:
                at = g.index, index
                fits = self._fits(at, keys, n, needed(g, lane, n), found, elsewhere)
                shorter = min(shorter, n if fits == n else max(fits, nothing_until(lane)))
            if shorter == n:
                return n
            n = min(n - unit_tokens, shorter // unit_tokens * unit_tokens)
        return 0

    def _fits(
        self,
        at: tuple[int, int],
        keys: PrefixKeys,
        n: int,
        needed: range | None,
        found: dict[tuple[int, int], range],
        elsewhere: Elsewhere | None,
    ) -> int:
        """`n` if a lane has all rows it wants, else a smaller number such that none in between works. `at` is
        (group, lane); `found` caches earlier look-ups by lane."""
        if needed is None:
            return n - 1
        before = found.get(at, range(0))
        if not needed or (needed.start >= before.start and needed.stop <= before.stop):
            return n
        group, lane = at
        size = self._groups[group].spec.block_size
        num_found = len(self.blocks(group, keys, needed, lane, elsewhere))
        found[at] = range(needed.start, (needed.start // size + num_found) * size)
        return n if found[at].stop == needed.stop else found[at].stop
