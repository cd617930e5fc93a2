"""Block tables of requests over all KV groups, and leases on blocks that a transfer still reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rayk.kv.block_pool import NULL_BLOCK, BlockPool
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import max_live_blocks
from rayk.types.allocator import BlockUpdates


@dataclass(slots=True)
class _Table:
    """One request's block table in one group. The first `num_trimmed` entries are null."""

    blocks: list[int]
    num_trimmed: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """Blocks that were put aside for a transfer: under a lease, or reserved for tokens that come."""

    num_leased: int
    """Ever since the engine was formed."""
    num_freed: int
    """Of these, given back."""

    @property
    def num_held(self) -> int:
        """Blocks that are put aside now."""
        return self.num_leased - self.num_freed


class KVCacheManager:
    """Allocates blocks of all groups from one pool. Implements types.allocator.BlockAllocator."""

    def __init__(self, groups: Sequence[KVCacheGroup], num_blocks: int) -> None:
        self.groups = tuple(groups)
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[_Table]] = {}
        self._leases: dict[str, list[list[int]]] = {}
        self._reserved: dict[str, int] = {}
        """Requests whose tables were reserved -> blocks at that time."""
        self._num_leased = self._num_freed = 0

    @property
    def ledger(self) -> Ledger:
        """What came of blocks that were put aside. A request's reservation counts until the request is over,
        or its blocks are leased on."""
        return Ledger(self._num_leased, self._num_freed)

    def extend(self, request_id: str, num_tokens: int) -> BlockUpdates | None:
        """Make the tables hold `num_tokens` tokens; see BlockAllocator.

        A new request's whole tables are reported, so that a resumed one overwrites what stood there.
        """
        tables = self._tables.get(request_id) or [_Table([]) for _ in self.groups]
        missing = [
            max(0, -(-num_tokens // g.spec.block_size) - len(t.blocks))
            for g, t in zip(self.groups, tables, strict=True)
        ]
        if sum(missing) > self.pool.num_free_blocks:
            return None
        updates = []
        for table, count in zip(tables, missing, strict=True):
            start = len(table.blocks)
            if count:
                table.blocks += self.pool.allocate(count, after=table.blocks[-1] if start else None)
            updates.append((start, tuple(table.blocks[start:])))
        self._tables[request_id] = tables
        return tuple(updates)

    def reserve_live(self, request_id: str, num_tokens: int) -> BlockUpdates | None:
        """Tables for a request whose first `num_tokens` tokens arrive from elsewhere: only live blocks exist.

        None, and nothing changed, when blocks are short.
        """
        assert request_id not in self._tables, f"{request_id} has blocks already"
        tables, needed = [], 0
        for g in self.groups:
            live = g.spec.live_rows(num_tokens)
            first = live.start // g.spec.block_size
            count = -(-num_tokens // g.spec.block_size) - first
            tables.append(_Table([NULL_BLOCK] * first, first))
            needed += count
        if needed > self.pool.num_free_blocks:
            return None
        for g, t in zip(self.groups, tables, strict=True):
            t.blocks += self.pool.allocate(-(-num_tokens // g.spec.block_size) - len(t.blocks))
        self._tables[request_id] = tables
        self._reserved[request_id] = needed
        self._num_leased += needed
        return tuple((0, tuple(t.blocks)) for t in tables)

    def rename(self, old_id: str, new_id: str) -> None:
        """Tables that were reserved under one name belong to a request from now on."""
        assert new_id not in self._tables, f"{new_id} has blocks already"
        self._tables[new_id] = self._tables.pop(old_id)
        self._reserved[new_id] = self._reserved.pop(old_id)

    def trim(self, request_id: str, num_computed_tokens: int) -> None:
        """Free blocks wholly before the live rows of their group."""
        for g, t in zip(self.groups, self._tables[request_id], strict=True):
            first = g.spec.live_rows(num_computed_tokens).start // g.spec.block_size
            if first > t.num_trimmed:
                self.pool.free(t.blocks[t.num_trimmed : first])
                t.blocks[t.num_trimmed : first] = [NULL_BLOCK] * (first - t.num_trimmed)
                t.num_trimmed = first

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """Block ids per group, nulls included."""
        return tuple(tuple(t.blocks) for t in self._tables[request_id])

    def free(self, request_id: str) -> None:
        """Give back what the request holds; unknown requests hold nothing."""
        for t in self._tables.pop(request_id, []):
            self.pool.free(t.blocks)
        self._num_freed += self._reserved.pop(request_id, 0)

    def unreserve(self, request_id: str) -> None:
        """Give a reservation back that nobody was told of: the ledger forgets it."""
        self._num_leased -= self._reserved.pop(request_id)
        self.free(request_id)

    def lease(self, request_id: str, lease_id: str) -> None:
        """The request is over but its blocks stay, held by the lease, until `release`."""
        assert lease_id not in self._leases, f"lease {lease_id} exists"
        self._leases[lease_id] = [t.blocks for t in self._tables.pop(request_id)]
        self._num_leased += _num_real(self._leases[lease_id])
        self._num_freed += self._reserved.pop(request_id, 0)

    def release(self, lease_id: str) -> None:
        """End a lease; its blocks may be reused from now on. Unknown leases are over already."""
        blocks_of = self._leases.pop(lease_id, [])
        self._num_freed += _num_real(blocks_of)
        for blocks in blocks_of:
            self.pool.free(blocks)

    @property
    def leases(self) -> tuple[str, ...]:
        """Leases that hold blocks now."""
        return tuple(self._leases)

    def holders(self, block_ids: Sequence[int]) -> dict[int, str]:
        """Block -> the request, or else the lease, that holds it now; blocks that nobody holds are absent."""
        wanted = set(block_ids)
        named = [(name, [t.blocks for t in tables]) for name, tables in self._tables.items()]
        return {
            block: name
            for name, tables in (*named, *self._leases.items())
            for table in tables
            for block in table
            if block in wanted and block != NULL_BLOCK
        }

    def max_request_blocks(self, num_tokens: int, max_batch_tokens: int) -> int:
        """Blocks one request of `num_tokens` needs at its peak, if chunks have at most `max_batch_tokens`."""
        return sum(max_live_blocks(g.spec, num_tokens, max_batch_tokens) for g in self.groups)

    def check_integrity(self) -> None:
        """Tables and leases hold exactly the pool's references, and the ledger adds up. AssertionError
        otherwise."""
        self.pool.check_integrity()
        held: Counter[int] = Counter()
        for tables in self._tables.values():
            for t in tables:
                held.update(b for b in t.blocks if b != NULL_BLOCK)
                assert all(b == NULL_BLOCK for b in t.blocks[: t.num_trimmed]), "trimmed blocks are null"
        for lease in self._leases.values():
            for blocks in lease:
                held.update(b for b in blocks if b != NULL_BLOCK)
        for block in range(1, self.pool.num_blocks):
            assert held[block] == self.pool.references(block), f"block {block}: references differ"
        aside = sum(self._reserved.values()) + sum(map(_num_real, self._leases.values()))
        assert aside == self.ledger.num_held, f"the ledger holds {self.ledger.num_held} blocks, not {aside}"


def _num_real(tables: Sequence[Sequence[int]]) -> int:
    return sum(b != NULL_BLOCK for blocks in tables for b in blocks)
