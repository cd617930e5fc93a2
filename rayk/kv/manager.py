"""Block tables of requests over all KV groups, and leases on blocks that a transfer still reads.

With prefix caching, full blocks are found again by their tokens; several tables may share one, read-only.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rayk.kv.block_pool import NULL_BLOCK, BlockPool
from rayk.kv.block_tables import BlockTable, live_part, num_real, since_in
from rayk.kv.groups import KVCacheGroup, max_request_blocks
from rayk.kv.prefix_cache import CachedPrefixes, Elsewhere, PrefixKeys, Since
from rayk.kv.riders import of_groups, tabled
from rayk.kv.specs import KVCacheSpec
from rayk.kv.usage import BlockUsage, Ledger, Tables
from rayk.types.allocator import BlockUpdates


@dataclass(frozen=True, slots=True)
class LocalPrefix:
    """The part of a sequence from elsewhere that is already cached here."""

    num_tokens: int
    """The live rows of this many leading tokens are here."""
    blocks: tuple[tuple[int, ...], ...]
    """Per group, the blocks that hold them, from the first live one on."""
    drafts: bool = True
    """Whether these hold rows of draft layers, too."""


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """Where the first blocks of a sequence are: here, or elsewhere."""

    num_tokens: int
    """Length of the prefix; 0 if nothing was found."""
    tables: tuple[tuple[int, ...], ...]
    """Per group, block ids by position; null where no row is needed or the block is missing."""
    missing: tuple[tuple[int, int, bytes], ...]
    """(group, index in its table, key) of blocks that are only elsewhere, in table order."""
    since: tuple[Since, ...] = ()
    """The first row per lane that is available elsewhere, for each missing block."""


class KVCacheManager:
    """Allocates blocks of all groups from one pool. Implements types.allocator.BlockAllocator."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        *,
        prefix_caching: bool = False,
        secret: bytes | None = None,
        looks_ahead: bool = False,
    ) -> None:
        """`secret` is the one of PrefixKeys. `looks_ahead`: rows of the groups that ride depend on the token
        after their own: so do blocks that are found by tokens."""
        self.all_groups = tuple(groups)
        """Riders too."""
        self.groups = tabled(groups)
        """Those that have block tables."""
        self.block_sizes = tuple(g.spec.block_size for g in self.groups)
        self._looks_ahead = looks_ahead
        self.prefixes: CachedPrefixes | None = None
        if prefix_caching:
            self.prefixes = CachedPrefixes(self.groups, secret, looks_ahead=looks_ahead)
        self.num_undrafted_tokens = 0
        """Tokens of cached prefixes that were computed once more, since rows of draft layers were lacking."""
        self.pool = BlockPool(num_blocks, self.prefixes.forget if self.prefixes is not None else None)
        self._keys: dict[str, PrefixKeys] = {}
        """Prefix keys of current requests, as far as they were needed."""
        self._tables: dict[str, list[BlockTable]] = {}
        self._leases: dict[str, list[BlockTable]] = {}
        self._reserved: dict[str, int] = {}
        """Requests with reserved tables -> number of blocks reserved."""
        self._num_leased = self._num_freed = 0
        self._usage = BlockUsage(len(self.groups), num_blocks)

    @property
    def ledger(self) -> Ledger:
        """Counts of blocks put aside, reservations until their request ends or is leased."""
        return Ledger(self._num_leased, self._num_freed)

    def extend(self, request_id: str, num_tokens: int) -> BlockUpdates | None:
        """Make the tables hold `num_tokens` tokens; see BlockAllocator. A new request's whole tables are
        reported, so that a resumed request overwrites its old ones."""
        tables = self._tables.get(request_id) or [BlockTable([]) for _ in self.groups]
        missing = self._missing(tables, num_tokens)
        if sum(missing) > self.pool.num_free_blocks:
            return None
        updates: list[tuple[int, tuple[int, ...]]] = []
        for index, count in enumerate(missing):
            blocks = tables[index].blocks
            start = len(blocks)
            if not count:
                updates.append((start, ()))
                continue
            fresh = self.pool.allocate(count, after=blocks[-1] if start else None)
            blocks += fresh
            self._usage.hold_fresh(index, fresh)
            updates.append((start, tuple(fresh)))
        self._tables[request_id] = tables
        return tuple(updates)

    @property
    def num_free_blocks(self) -> int:
        """Count the blocks that requests can get."""
        return self.pool.num_free_blocks

    @property
    def has_riders(self) -> bool:
        """Whether a drafter keeps rows beside those of the model."""
        return len(self.groups) < len(self.all_groups)

    @property
    def finds_prefixes(self) -> bool:
        """Whether `match` may give anything."""
        return self.prefixes is not None

    def num_missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """Count the blocks that `extend` takes."""
        tables = self._tables.get(request_id) or [BlockTable([]) for _ in self.groups]
        return sum(self._missing(tables, num_tokens))

    def _missing(self, tables: Tables, num_tokens: int) -> list[int]:
        """Count, per group, the blocks that tables lack for so many tokens."""
        sizes = zip(self.block_sizes, tables, strict=True)
        return [max(0, -(-num_tokens // size) - len(t.blocks)) for size, t in sizes]

    def max_new_blocks(self, num_tokens: int) -> int:
        """Count the most blocks that so many more tokens of any request take."""
        return sum(-(-num_tokens // g.spec.block_size) for g in self.groups)

    def num_live_blocks(self, num_tokens: int) -> int:
        """Count the blocks that `reserve_live` takes for so many tokens, none of which is here."""
        specs = [g.spec for g in self.groups]
        return sum(
            -(-num_tokens // s.block_size) - s.live_rows(num_tokens).start // s.block_size for s in specs
        )

    def match(
        self, request_id: str, token_ids: Sequence[int], max_tokens: int, cache_salt: str | None = None
    ) -> int:
        """Give a request that has no blocks those of its longest cached prefix; see BlockAllocator."""
        assert request_id not in self._tables, f"{request_id} has blocks already"
        if self.prefixes is None or max_tokens < self.prefixes.unit_tokens:
            return 0
        max_tokens = self._num_keyed(token_ids, max_tokens)
        keys = self.prefix_keys(request_id, token_ids, max_tokens, cache_salt)
        unit = self.prefixes.unit_tokens
        num_tokens = self.prefixes.longest(keys, max_tokens, unit, _live_rows)
        if self.has_riders:
            undrafted = self.prefixes.longest(keys, max_tokens, unit, _live_rows, drafts=False)
            self.num_undrafted_tokens += undrafted - num_tokens
        if not num_tokens:
            return 0
        tables = []
        for g in self.groups:
            live = min((_live_rows(g, lane, num_tokens) for lane in g.lanes), key=lambda r: r.start)
            blocks = self.prefixes.blocks(g.index, keys, live)
            self.pool.share(blocks)
            first = num_tokens // g.spec.block_size - len(blocks)
            table = [NULL_BLOCK] * first + blocks
            tables.append(BlockTable(table, first, len(table), self.prefixes.since(g.index, table)))
        self._take(request_id, tables)
        return num_tokens

    def unmatch(self, request_id: str) -> None:
        """Give back what `match` found, because the request cannot start yet."""
        self._give_back(self._tables.pop(request_id))

    def _take(self, request_id: str, tables: list[BlockTable]) -> None:
        """Register tables whose blocks the pool has handed out."""
        self._tables[request_id] = tables
        for index, t in enumerate(tables):
            self._usage.hold(index, t.blocks)

    def _give_back(self, tables: Tables, *, leased: bool = False) -> None:
        for index, t in enumerate(tables):
            self._usage.drop(index, t.blocks, leased=leased)
            self.pool.free(t.blocks)

    def remember(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        cache_salt: str | None = None,
    ) -> None:
        """Make full blocks findable by their content; see BlockAllocator."""
        tables = self._tables.get(request_id)
        if self.prefixes is None or tables is None:
            return
        num_computed_tokens = self._num_keyed(token_ids, num_computed_tokens)
        for g, t in zip(self.groups, tables, strict=True):
            if g.carries is not None and t.lacks_last:
                t.lack_last(len(g.lanes), num_computed_tokens)
            num_full = num_computed_tokens // g.spec.block_size
            if num_full <= t.num_named:
                continue
            keys = self.prefix_keys(request_id, token_ids, num_computed_tokens, cache_salt)
            for index in range(t.num_named, num_full):
                if t.blocks[index] != NULL_BLOCK:
                    since = since_in(g, index, (t.filled[index] or None) if index in t.filled else t.since)
                    self._name(g, keys[(index + 1) * g.spec.block_size], t.blocks[index], since)
            t.num_named = num_full

    def _name(self, group: KVCacheGroup, key: bytes, block: int, since: Since) -> None:
        """Make a block findable, replacing one that holds fewer rows."""
        assert self.prefixes is not None
        outdone = self.prefixes.outdone(group.index, key, since)
        if outdone is not None and outdone != block:
            self.prefixes.forget([outdone])
            self.pool.forget(outdone)
        if self.prefixes.put(group.index, key, block, since):
            self.pool.keep(block)

    def find_local_prefix(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_tokens: int,
        unit_tokens: int,
        cache_salt: str | None = None,
        *,
        drafts: bool = True,
    ) -> LocalPrefix:
        """Return the cached part of a sequence of `num_tokens` tokens that will come from elsewhere: its live
        rows before a multiple of `unit_tokens`. `drafts`: those of draft layers count, since theirs will
        come, too."""
        nothing = LocalPrefix(0, tuple(() for _ in self.groups))
        if self.prefixes is None:
            return nothing

        def unseen(lane: KVCacheSpec) -> int:
            return lane.live_rows(num_tokens).start

        def needed(g: KVCacheGroup, lane: KVCacheSpec, n: int) -> range | None:
            first = unseen(lane)
            if n <= first:
                return range(0)
            return range(first, n) if n % g.spec.block_size == 0 else None

        keys = self.prefix_keys(request_id, token_ids, num_tokens, cache_salt)
        most = self._num_keyed(token_ids, num_tokens)
        num_found = self.prefixes.longest(keys, most, unit_tokens, needed, unseen, drafts=drafts)
        if not num_found:
            return nothing
        blocks = []
        for g in self.groups:
            lanes = g.lanes if drafts else g.own_lanes
            of_lanes = [r for lane in lanes if (r := needed(g, lane, num_found))]
            longest = min(of_lanes, key=lambda r: r.start, default=range(0))
            blocks.append(self.prefixes.blocks(g.index, keys, longest))
        return LocalPrefix(num_found, tuple(map(tuple, blocks)), drafts)

    def find_prefix(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        num_local_tokens: int = 0,
        elsewhere: Elsewhere | None = None,
        cache_salt: str | None = None,
        *,
        drafts: bool = True,
    ) -> FoundPrefix:
        """Return the longest usable prefix whose blocks are here or `elsewhere`: a multiple of `unit_tokens`,
        up to `max_tokens`. Changes nothing. Without `drafts`, rows of draft layers may lack.

        `num_local_tokens`: the caller already has the live rows of this many leading tokens; only longer
        prefixes count.
        """
        nothing = FoundPrefix(0, tuple(() for _ in self.groups), ())
        if self.prefixes is None:
            return nothing

        # Ask about each block once: blocks elsewhere may be lost at any time.
        answers: dict[tuple[int, bytes], Since | None] = {}

        def there(group: int, key: bytes) -> Since | None:
            if (group, key) not in answers:
                answers[group, key] = None if elsewhere is None else elsewhere(group, key)
            return answers[group, key]

        max_tokens = self._num_keyed(token_ids, max_tokens)
        keys = self.prefix_keys(request_id, token_ids, max_tokens, cache_salt)
        while True:
            found = self._find(keys, max_tokens, num_local_tokens, there, drafts=drafts)
            if found is None:
                return nothing
            lacking = self._lacking(found, num_local_tokens, drafts=drafts)
            if not lacking:
                return found
            # One lane has its rows here, another elsewhere, and no block has both.
            answers |= dict.fromkeys(lacking)

    def _find(
        self, keys: PrefixKeys, max_tokens: int, num_local_tokens: int, there: Elsewhere, *, drafts: bool
    ) -> FoundPrefix | None:
        """Return one attempt of find_prefix; None if nothing is found."""
        assert self.prefixes is not None

        def needed(g: KVCacheGroup, lane: KVCacheSpec, n: int) -> range:
            return range(max(_live_rows(g, lane, n).start, num_local_tokens), n)

        unit = self.prefixes.unit_tokens
        num_tokens = self.prefixes.longest(keys, max_tokens, unit, needed, elsewhere=there, drafts=drafts)
        if num_tokens <= num_local_tokens:
            return None
        tables: list[tuple[int, ...]] = []
        missing: list[tuple[int, int, bytes]] = []
        for g in self.groups:
            size = g.spec.block_size
            found: dict[int, set[int]] = {}
            for number, lane in enumerate(g.lanes if drafts else g.own_lanes):
                rows = needed(g, lane, num_tokens)
                blocks = self.prefixes.blocks(g.index, keys, rows, number, there)
                for index, block in enumerate(blocks, rows.start // size):
                    found.setdefault(index, set()).add(block)
            # A block that one lane lacks is missing for all.
            tables.append(tuple(min(found.get(i, {NULL_BLOCK})) for i in range(num_tokens // size)))
            gone = sorted(index for index, of_lanes in found.items() if NULL_BLOCK in of_lanes)
            missing += [(g.index, index, keys[(index + 1) * size]) for index in gone]
        since = tuple(there(group, key) or () for group, _, key in missing)
        return FoundPrefix(num_tokens, tuple(tables), tuple(missing), since)

    def _lacking(self, found: FoundPrefix, num_local_tokens: int, *, drafts: bool) -> list[tuple[int, bytes]]:
        """Missing blocks that have too few rows elsewhere for some lane."""
        lacking = []
        for (group, index, key), since in zip(found.missing, found.since, strict=True):
            g = self.groups[group]
            start = index * g.spec.block_size
            for lane, first in zip(g.lanes if drafts else g.own_lanes, since, strict=False):
                row = max(_live_rows(g, lane, found.num_tokens).start, num_local_tokens, start)
                if first > row and row < min(start + g.spec.block_size, found.num_tokens):
                    lacking.append((group, key))
                    break
        return lacking

    def adopt(self, name: str, found: FoundPrefix) -> tuple[tuple[int, ...], ...] | None:
        """Make tables for a prefix that `find_prefix` just returned: cached blocks are shared, missing ones
        allocated where `found.missing` says. Returns the table of each group, as `group_tables` does; None,
        with nothing changed, if blocks are short.

        The caller bumps the generations of the fresh blocks, fills them as `found.since` says, and then calls
        `remember(name, token_ids, found.num_tokens)`, which makes them findable. If it could fill only some,
        it names a shorter prefix, or none, and frees the tables.
        """
        assert name not in self._tables, f"{name} has blocks already"
        assert self.prefixes is not None
        here = [block for table in found.tables for block in table if block != NULL_BLOCK]
        num_spare = self.pool.num_free_blocks - sum(not self.pool.references(block) for block in here)
        if len(found.missing) > num_spare:
            return None
        self.pool.share(here)
        fresh = self.pool.allocate(len(found.missing))
        tables = [list(table) for table in found.tables]
        for (group, index, _), block in zip(found.missing, fresh, strict=True):
            tables[group][index] = block
        made: list[BlockTable] = []
        for g, blocks in zip(self.groups, tables, strict=True):
            first = next((i for i, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
            pairs = zip(found.missing, found.since, strict=True)
            filled = {index: rows for (group, index, _), rows in pairs if group == g.index}
            since = self.prefixes.since(g.index, blocks, filled)
            made.append(BlockTable(blocks, first, first, since, filled))
        self._take(name, made)
        return self.group_tables(name)

    def reserve_live(
        self, request_id: str, num_tokens: int, local_prefix: LocalPrefix | None = None
    ) -> BlockUpdates | None:
        """Make tables for a request whose first `num_tokens` tokens arrive from elsewhere; only live blocks
        are allocated. `local_prefix` (from `find_local_prefix` just now) need not arrive. Returns the whole
        table of each group, riders too; None, with nothing changed, if blocks are short.
        """
        assert request_id not in self._tables, f"{request_id} has blocks already"
        tables, needed = [], 0
        for g, here in zip(
            self.groups, local_prefix.blocks if local_prefix else [()] * len(self.groups), strict=True
        ):
            first = g.spec.live_rows(num_tokens).start // g.spec.block_size
            if here and local_prefix:
                # In a group that keeps all rows, layers with windows may need only later ones.
                first = local_prefix.num_tokens // g.spec.block_size - len(here)
            since = tuple(lane.live_rows(num_tokens).start for lane in g.own_lanes)
            if g.carries is not None:
                since += (0 if local_prefix is None or local_prefix.drafts else num_tokens,)
            num_named = min(since) // g.spec.block_size
            tables.append(BlockTable([NULL_BLOCK] * first + list(here), first, num_named, since))
            needed += -(-num_tokens // g.spec.block_size) - first - len(here)
            self.pool.share(here)
        if needed > self.pool.num_free_blocks:
            for t in tables:
                self.pool.free(t.blocks)
            return None
        for g, t in zip(self.groups, tables, strict=True):
            t.blocks += self.pool.allocate(-(-num_tokens // g.spec.block_size) - len(t.blocks))
        self._take(request_id, tables)
        self._reserved[request_id] = needed
        self._num_leased += needed
        return tuple((0, table) for table in self.group_tables(request_id))

    def lack_drafts(self, request_id: str, num_tokens: int) -> None:
        """Rows of draft layers did not arrive with the first `num_tokens` tokens. Until `have_drafts` those
        of later tokens lack, too: nobody will find them."""
        for g, t in zip(self.groups, self._tables[request_id] if num_tokens else (), strict=False):
            if g.carries is not None:
                t.lack_last(len(g.lanes), num_tokens)

    def have_drafts(self, request_id: str) -> None:
        """Rows of draft layers that a request lacked are there: `remember` tells of its blocks again."""
        for g, t in zip(self.groups, self._tables[request_id], strict=True):
            if g.carries is not None:
                t.have_last()

    def first_draft_row(self, name: str) -> int:
        """Return the first row of a request, or lease, that is present in draft layers; 0: all are."""
        tables = self._tables.get(name) or self._leases.get(name) or []
        found = (t.since[-1] for g, t in zip(self.groups, tables, strict=False) if g.carries and t.since)
        return max(found, default=0)

    def rename(self, old_id: str, new_id: str) -> None:
        """Move tables that were reserved under one name to another."""
        assert new_id not in self._tables, f"{new_id} has blocks already"
        self._tables[new_id] = self._tables.pop(old_id)
        self._reserved[new_id] = self._reserved.pop(old_id)
        self._keys.pop(old_id, None)

    def trim(self, request_id: str, num_computed_tokens: int) -> None:
        """Free blocks that end before the live rows of their group."""
        for index, (g, t) in enumerate(zip(self.groups, self._tables[request_id], strict=True)):
            first = g.spec.live_rows(num_computed_tokens).start // g.spec.block_size
            if first > t.num_trimmed:
                self._usage.drop(index, t.blocks[t.num_trimmed : first])
                self.pool.free(t.blocks[t.num_trimmed : first])
                t.blocks[t.num_trimmed : first] = [NULL_BLOCK] * (first - t.num_trimmed)
                t.num_trimmed = first

    def next_change(self, request_id: str) -> int:
        """Return when a request's next block gets a name or is freed; see BlockAllocator."""
        found = sys.maxsize
        for g, t in zip(self.groups, self._tables[request_id], strict=True):
            size = g.spec.block_size
            if self.prefixes is not None:
                found = min(found, (t.num_named + 1) * size)
            if (trimmed := g.spec.dead_at((t.num_trimmed + 1) * size)) is not None:
                found = min(found, trimmed)
        return found

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """List the block ids per group that has a block table, nulls included."""
        return tuple(tuple(t.blocks) for t in self._tables[request_id])

    def group_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """List the same per group: a rider has the table of the group on which it rides."""
        return of_groups(self.all_groups, self.block_tables(request_id))

    def free(self, request_id: str) -> None:
        """Give back what the request holds; an unknown request holds nothing."""
        self._keys.pop(request_id, None)
        self._give_back(self._tables.pop(request_id, []))
        self._num_freed += self._reserved.pop(request_id, 0)

    def unreserve(self, request_id: str) -> None:
        """Give back a reservation that nobody was told of, and take it out of the ledger."""
        self._num_leased -= self._reserved.pop(request_id)
        self.free(request_id)

    def lease(self, request_id: str, lease_id: str) -> None:
        """End the request but keep its blocks, held by the lease until `release`."""
        assert lease_id not in self._leases, f"lease {lease_id} exists"
        self._keys.pop(request_id, None)
        self._leases[lease_id] = self._tables.pop(request_id)
        self._usage.change_hands(self._leases[lease_id], leased=True)
        self._num_leased += num_real(self._leases[lease_id])
        self._num_freed += self._reserved.pop(request_id, 0)

    def share_lease(
        self, request_id: str, lease_id: str, num_tokens: int
    ) -> tuple[tuple[int, ...], ...] | None:
        """Lease the live rows of a request's first `num_tokens` computed tokens while the request goes on; it
        may be freed independently. Returns the lease's tables by group, riders too: null before the first
        live block. Rows of draft layers may lack, see `first_draft_row`.

        None, with nothing changed, if some of these rows are missing (trimmed, or never received), or if a
        state is not its block's last, since the request will overwrite it.
        """
        assert lease_id not in self._leases, f"lease {lease_id} exists"
        shared: list[BlockTable] = []
        for g, t in zip(self.groups, self._tables.get(request_id, ()), strict=False):
            part = live_part(g, t, num_tokens)
            if part is not None:
                shared.append(part)
        if len(shared) < len(self.groups):
            return None
        for index, part in enumerate(shared):
            self.pool.share(part.blocks[part.num_trimmed :])
            self._usage.hold(index, part.blocks, leased=True)
        self._leases[lease_id] = shared
        self._num_leased += num_real(shared)
        return of_groups(self.all_groups, tuple(tuple(part.blocks) for part in shared))

    def release(self, lease_id: str) -> None:
        """End a lease, so that its blocks may be reused. An unknown lease is already over."""
        tables = self._leases.pop(lease_id, [])
        self._num_freed += num_real(tables)
        self._give_back(tables, leased=True)

    def forget(self, blocks: Collection[int] | None = None) -> int:
        """Make these blocks (None: all) unfindable; returns how many were findable."""
        assert self.prefixes is not None, "blocks are found by prefixes"
        gone = [block for block in self.prefixes.named if blocks is None or block in blocks]
        for block in gone:
            self.pool.forget(block)
        self.prefixes.forget(gone)
        return len(gone)

    @property
    def leases(self) -> tuple[str, ...]:
        return tuple(self._leases)

    def holders(self, block_ids: Sequence[int]) -> dict[int, str]:
        """Block -> the request, or else the lease, that holds it; blocks without a holder are absent."""
        ids = set(block_ids)
        return {
            block: name
            for name, tables in (*self._leases.items(), *self._tables.items())
            for t in tables
            for block in t.blocks
            if block in ids and block != NULL_BLOCK
        }

    def count_blocks(self) -> dict[str, dict[str, int]]:
        """Blocks used and leased, by group index; "pool" counts each block once, free and cached ones too."""
        counts = {
            str(index): {"used": self._usage.num_used(index), "leased": self._usage.num_leased(index)}
            for index in range(len(self.groups))
        }
        num_free, num_cached = self.pool.num_free_blocks, self.pool.num_cached_blocks
        num_leased = sum(c["leased"] for c in counts.values())
        num_used = self.pool.num_blocks - 1 - num_free - num_leased
        counts["pool"] = {
            "free": num_free - num_cached,
            "cached": num_cached,
            "used": num_used,
            "leased": num_leased,
        }
        return counts

    def max_request_blocks(self, num_tokens: int, max_batch_tokens: int) -> int:
        return max_request_blocks(self.groups, num_tokens, max_batch_tokens)

    def check_integrity(self) -> None:
        """Assert that tables and leases hold exactly the pool's references and that the ledger adds up."""
        self.pool.check_integrity()
        counts: Counter[int] = Counter()
        for tables in (*self._tables.values(), *self._leases.values()):
            for t in tables:
                counts.update(b for b in t.blocks if b != NULL_BLOCK)
                assert all(b == NULL_BLOCK for b in t.blocks[: t.num_trimmed]), "trimmed blocks are null"
        for block in range(1, self.pool.num_blocks):
            assert counts[block] == self.pool.references(block), f"block {block}: references differ"
        if self.prefixes is not None:
            kept = [b for b in range(self.pool.num_blocks) if self.pool.is_kept(b)]
            assert all(b in self.prefixes for b in kept), "a block is kept under no name"
            assert len(kept) == len(self.prefixes), "a name stands for a block that is not kept"
        aside = sum(self._reserved.values()) + sum(map(num_real, self._leases.values()))
        assert aside == self.ledger.num_held, f"the ledger holds {self.ledger.num_held} blocks, not {aside}"
        self._usage.check(self._tables.values(), self._leases.values())

    def _num_keyed(self, token_ids: Sequence[int], num_tokens: int) -> int:
        """Count the tokens, of the first `num_tokens`, up to which prefixes have keys."""
        return min(num_tokens, len(token_ids) - 1) if self._looks_ahead else num_tokens

    def prefix_keys(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, cache_salt: str | None = None
    ) -> PrefixKeys:
        """Return the keys of a request's blocks up to `num_tokens` tokens, kept until it is freed.
        AssertionError without prefix caching, and for another salt than before."""
        assert self.prefixes is not None, "blocks have no names without prefix caching"
        keys = self._keys.get(request_id)
        if keys is None:
            keys = self._keys[request_id] = self.prefixes.make_keys(cache_salt)
        assert keys.cache_salt == cache_salt, f"{request_id} has changed its salt"
        keys.extend(token_ids, num_tokens)
        return keys


def _live_rows(group: KVCacheGroup, lane: KVCacheSpec, num_tokens: int) -> range:
    """List rows that a sequence of `num_tokens` tokens, ending at a block's end, needs to go on."""
    del group
    return range(lane.live_rows(num_tokens).start, num_tokens)
