"""A brute-force model of the prefix cache: a memory that knows, of every row that was written, all tokens up
to it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis.stateful import RuleBasedStateMachine

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import FoundPrefix, KVCacheManager
from rayk.kv.prefix_cache import PrefixKeys

Tokens = tuple[int, ...]
MAX_TOKENS = 60
SECRET = b"which names outlive a process by"


def rows_of(g: KVCacheGroup, block: int) -> range:
    """Positions whose content a block keeps."""
    size = g.spec.block_size
    stop = (block + 1) * size
    return range(block * size, stop) if g.spec.has_token_rows else range(stop - 1, stop)


class CacheModel(RuleBasedStateMachine):
    """What must be found, and what must be in it. Walks add their rules."""

    manager: KVCacheManager
    is_caching: bool

    def __init__(self) -> None:
        super().__init__()
        self.groups: tuple[KVCacheGroup, ...] = ()
        self.memory: dict[tuple[int, int, int], tuple[int, Tokens]] = {}
        """(block, layer, row) -> group and the tokens up to the row; a state's only row is 0."""
        self.named: dict[tuple[int, Tokens], int] = {}
        """What can be found: (group, tokens up to a block's end) -> the block."""
        self.tokens: dict[str, Tokens] = {}
        self.num_computed: dict[str, int] = {}
        self.arrived: dict[str, int] = {}
        """Requests that came from elsewhere -> with so many tokens."""
        self.leases: dict[str, tuple[Tokens, int, int] | None] = {}
        """Tokens, how many are computed and how many came; None where nobody can go on with them."""
        self.shares: dict[str, tuple[Tokens, int, list[list[int]]]] = {}
        """Leases beside requests: tokens, how many of them, and the tables."""
        self.disk: dict[tuple[int, Tokens], tuple[int, ...]] = {}
        """Blocks in another place: (group, tokens up to its end) -> from where on rows are there, by lane;
        empty: all."""
        self.written: list[Tokens] = []
        self.tokens_of: dict[bytes, Tokens] = {}
        """By key, what ends in it."""
        self.num_leases = 0

    def hand_out(self, blocks: list[int]) -> None:
        """Blocks are somebody's from now on: what was in them is lost."""
        assert len(set(blocks)) == len(blocks)
        self.memory = {key: value for key, value in self.memory.items() if key[0] not in blocks}
        self.named = {key: block for key, block in self.named.items() if block not in blocks}

    def write(self, g: KVCacheGroup, layer: int, table: Sequence[int], row: int, tokens: Tokens) -> None:
        block = table[row // g.spec.block_size]
        assert block != NULL_BLOCK, "written into a block that nobody gave"
        assert block not in self.named.values(), "written into a block that others may find"
        shared = sum(block in t for _, _, tables in self.shares.values() for t in tables)
        assert self.manager.pool.references(block) == 1 + shared, "written into a block that others hold"
        at = row % g.spec.block_size if g.spec.has_token_rows else 0
        self.memory[block, layer, at] = g.index, tokens[: row + 1]

    def check_rows(
        self,
        g: KVCacheGroup,
        table: Sequence[int],
        tokens: Tokens,
        num_tokens: int,
        start: int = 0,
        stop: int = MAX_TOKENS * 4,
    ) -> None:
        """What each layer sees of so many tokens is what it stands for: its rows in [start, stop)."""
        for layer in g.layers:
            live = g.seen_by(layer).live_rows(num_tokens)
            for row in range(max(start, live.start), min(stop, live.stop)):
                at = row % g.spec.block_size if g.spec.has_token_rows else 0
                found = self.memory.get((table[row // g.spec.block_size], layer, at))
                assert found == (g.index, tokens[: row + 1]), f"row {row} of layer {layer}: {found}"

    def name(self, request: str, start: int = 0) -> None:
        """Blocks of a request that became full after `start` tokens and hold any row can be found: of several
        alike the first one that holds more than those before it."""
        if not self.is_caching:
            return
        tokens, n = self.tokens[request], self.num_computed[request]
        for g, table in zip(self.groups, self.manager.block_tables(request), strict=True):
            size = g.spec.block_size
            for index, block in enumerate(table[start // size : n // size], start // size):
                prefix = tokens[: (index + 1) * g.spec.block_size]
                since = self.since(g, block, prefix)
                if min(since.values()) == len(prefix):
                    continue
                known = self.named.get((g.index, prefix))
                before = self.since(g, known, prefix) if known is not None else since
                is_more = before != since and all(before[layer] >= since[layer] for layer in g.layers)
                if known is None or is_more:
                    self.named[g.index, prefix] = block

    def since(self, g: KVCacheGroup, block: int, prefix: Tokens) -> dict[int, int]:
        """Of a block that ends this prefix: from where on each layer's rows are there, to its end."""
        found = {}
        for layer in g.layers:
            found[layer] = len(prefix)
            for row in reversed(rows_of(g, len(prefix) // g.spec.block_size - 1)):
                at = row % g.spec.block_size if g.spec.has_token_rows else 0
                if self.memory.get((block, layer, at)) != (g.index, prefix[: row + 1]):
                    break
                found[layer] = row
        return found

    def forget(self, request: str) -> None:
        self.tokens.pop(request, None)
        self.num_computed.pop(request, None)
        self.arrived.pop(request, None)

    def put_aside(self, request: str) -> str:
        lease = f"lease{self.num_leases}"
        self.num_leases += 1
        self.manager.lease(request, lease)
        arrived = self.arrived.get(request, 0)
        self.leases[lease] = self.tokens[request], self.num_computed[request], arrived
        self.forget(request)
        return lease

    def learn_keys(self, tokens: Tokens) -> None:
        """Names by the secret, made without the manager."""
        keys = PrefixKeys({g.spec.block_size for g in self.groups}, SECRET)
        keys.extend(tokens, len(tokens))
        for g in self.groups:
            for end in range(g.spec.block_size, len(tokens) + 1, g.spec.block_size):
                self.tokens_of[keys[end]] = tokens[:end]

    def is_on_disk(self, group: int, key: bytes) -> tuple[int, ...] | None:
        return self.disk.get((group, self.tokens_of[key]))

    def disk_has(self, g: KVCacheGroup, tokens: Tokens, index: int, n: int, num_local: int) -> bool:
        """Whether the block on disk at this place holds all that is wanted of it."""
        size = g.spec.block_size
        since = self.disk.get((g.index, tokens[: (index + 1) * size]))
        if since is None:
            return False
        return not since or all(
            row >= since[g.lanes.index(g.seen_by(layer))]
            for layer in g.layers
            for row in g.seen_by(layer).live_rows(n)
            if index * size <= row < (index + 1) * size and row >= num_local
        )

    def is_there(self, tables: Sequence[Sequence[int]], tokens: Tokens, n: int) -> bool:
        """Whether tables hold what lives after n tokens, and will."""
        for g, table in zip(self.groups, tables, strict=True):
            if not g.spec.has_token_rows and n % g.spec.block_size:
                return False
            if len(table) < -(-n // g.spec.block_size):
                return False
            for layer in g.layers:
                for row in g.seen_by(layer).live_rows(n):
                    at = row % g.spec.block_size if g.spec.has_token_rows else 0
                    known = self.memory.get((table[row // g.spec.block_size], layer, at))
                    if known != (g.index, tokens[: row + 1]):
                        return False
        return True

    def is_named(self, g: KVCacheGroup, layer: int, tokens: Tokens, rows: Sequence[int]) -> bool:
        """Whether blocks with all these rows of a layer can be found."""
        size = g.spec.block_size
        for row in rows:
            prefix = tokens[: (row // size + 1) * size]
            block = self.named.get((g.index, prefix))
            if len(prefix) % size or block is None or self.since(g, block, prefix)[layer] > row:
                return False
        return True

    def best_hit(self, tokens: Tokens, most: int) -> int:
        for n in range(most, 0, -1):
            if all(
                n % g.spec.block_size == 0
                and self.is_named(g, layer, tokens[:n], g.seen_by(layer).live_rows(n))
                for g in self.groups
                for layer in g.layers
            ):
                return n
        return 0

    def has_block(self, g: KVCacheGroup, tokens: Tokens, index: int, n: int, num_local: int) -> bool:
        """Whether the block here at this place holds all that is wanted of it to go on from n tokens."""
        size = g.spec.block_size
        in_block = range(index * size, (index + 1) * size)
        return all(
            self.is_named(g, layer, tokens, [row])
            for layer in g.layers
            for row in g.seen_by(layer).live_rows(n)
            if row in in_block and row >= num_local
        )

    def wanted_blocks(self, g: KVCacheGroup, n: int, num_local: int) -> list[int]:
        rows = {row for layer in g.layers for row in g.seen_by(layer).live_rows(n) if row >= num_local}
        return sorted({row // g.spec.block_size for row in rows})

    def best_prefix(self, tokens: Tokens, most: int, num_local: int) -> int:
        for n in range(most, num_local, -1):
            if all(
                n % g.spec.block_size == 0
                and all(
                    self.has_block(g, tokens, index, n, num_local)
                    or self.disk_has(g, tokens, index, n, num_local)
                    for index in self.wanted_blocks(g, n, num_local)
                )
                for g in self.groups
            ):
                return n if self.is_caching else 0
        return 0

    def check_found(self, found: FoundPrefix, tokens: Tokens, best: int, num_local: int) -> None:
        """The longest prefix, all its blocks, and those missing that are not here."""
        assert found.num_tokens == best
        if not best:
            assert found == FoundPrefix(0, tuple(() for _ in self.groups), ())
            return
        missing = []
        for g, table in zip(self.groups, found.tables, strict=True):
            wanted = self.wanted_blocks(g, best, num_local)
            gone = [i for i in wanted if not self.has_block(g, tokens, i, best, num_local)]
            missing += [(g.index, i, tokens[: (i + 1) * g.spec.block_size]) for i in gone]
            here = [i for i, block in enumerate(table) if block != NULL_BLOCK]
            assert here == [i for i in wanted if i not in gone]
            for i in here:
                assert table[i] == self.named[g.index, tokens[: (i + 1) * g.spec.block_size]]
        assert [(group, i, self.tokens_of[key]) for group, i, key in found.missing] == missing

    def longest_local(self, tokens: Tokens, unit: int) -> int:
        for n in range(len(tokens) // unit * unit, 0, -unit):
            live = [(g, i, g.seen_by(i).live_rows(len(tokens))) for g in self.groups for i in g.layers]
            if all(
                self.is_named(g, layer, tokens[:n], range(rows.start, min(n, rows.stop)))
                for g, layer, rows in live
            ):
                return n if self.is_caching else 0
        return 0
