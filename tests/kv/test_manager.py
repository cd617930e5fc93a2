"""Block tables and leases: a random walk beside a trivial model, integrity checked after every step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from tests.each import each
from tests.kv.brute import chunked, full, mamba2, sliding

BLOCK = 4
WINDOW = 6
NUM_BLOCKS = 32
CHUNK, ODD_CHUNK = 8, 6
"""Of two blocks, and of one and a half."""
SPECS = (
    full(BLOCK),
    sliding(WINDOW),
    sliding(WINDOW),
    mamba2(block_size=3),
    mamba2(block_size=1000),
    chunked(CHUNK),
    chunked(ODD_CHUNK),
)
GROUPS = tuple(KVCacheGroup(i, spec, (i,), 1) for i, spec in enumerate(SPECS))
BLOCKS = (BLOCK, BLOCK, BLOCK, 3, 1000, BLOCK, BLOCK)
WINDOWS = (None, WINDOW, WINDOW, 2, 2, None, None)
"""Of a state only the last token's row is read: as if tokens saw themselves and the one before."""
CHUNKS = (None, None, None, None, None, CHUNK, ODD_CHUNK)
Tables = list[list[int]]


def num_dead_blocks(
    window: int | None, num_computed: int, block_size: int = BLOCK, chunk: int | None = None
) -> int:
    """Leading blocks of which no token at position >= num_computed sees anything, and that have no place for
    one either."""

    def is_seen(row: int) -> bool:
        if row >= num_computed:
            return True
        if chunk is not None:
            return row // chunk == num_computed // chunk
        return window is None or row > num_computed - window

    dead = 0
    while not any(is_seen(row) for row in range(dead * block_size, (dead + 1) * block_size)):
        dead += 1
    return dead


def num_dead(num_computed: int) -> list[int]:
    """The same for each group."""
    return [num_dead_blocks(w, num_computed, b, c) for w, b, c in zip(WINDOWS, BLOCKS, CHUNKS, strict=True)]


class ManagerWalk(RuleBasedStateMachine):
    """Requests r0..r3; the model is what each update said, and which blocks are known to be dead."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(GROUPS, NUM_BLOCKS)
        self.tables: dict[str, Tables] = {}
        self.num_tokens: dict[str, int] = {}
        self.leases: dict[str, Tables] = {}
        self.num_leases = 0

    requests = st.sampled_from(["r0", "r1", "r2", "r3"])

    @property
    def num_blocks_in_use(self) -> int:
        tables = [*self.tables.values(), *self.leases.values()]
        return sum(block != NULL_BLOCK for tables_ in tables for table in tables_ for block in table)

    @rule(request=requests, more=st.integers(0, 17))
    def extend(self, request: str, more: int) -> None:
        tables = self.tables.get(request, [[] for _ in GROUPS])
        total = self.num_tokens.get(request, 0) + more
        missing = [-(-total // b) - len(table) for b, table in zip(BLOCKS, tables, strict=True)]
        free = NUM_BLOCKS - 1 - self.num_blocks_in_use
        updates = self.manager.extend(request, total)
        if sum(missing) > free:
            assert updates is None
            return
        assert updates is not None
        for table, (start, ids), count in zip(tables, updates, missing, strict=True):
            assert start == len(table)
            assert len(ids) == count
            assert NULL_BLOCK not in ids
            table += ids
        self.tables[request], self.num_tokens[request] = tables, total

    @rule(request=requests, num_tokens=st.integers(1, 30))
    def reserve_live(self, request: str, num_tokens: int) -> None:
        if request in self.tables:
            return
        lengths = [-(-num_tokens // b) for b in BLOCKS]
        dead = num_dead(num_tokens)
        free = NUM_BLOCKS - 1 - self.num_blocks_in_use
        updates = self.manager.reserve_live(request, num_tokens)
        if sum(lengths) - sum(dead) > free:
            assert updates is None
            return
        assert updates is not None
        assert [start for start, _ in updates] == [0] * len(GROUPS)
        for (_, ids), count, length in zip(updates, dead, lengths, strict=True):
            assert len(ids) == length
            assert [block == NULL_BLOCK for block in ids] == [i < count for i in range(length)]
        self.tables[request] = [list(ids) for _, ids in updates]
        self.num_tokens[request] = num_tokens

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.tables)))
        num_computed = data.draw(st.integers(0, self.num_tokens[request]))
        self.manager.trim(request, num_computed)
        for table, dead in zip(self.tables[request], num_dead(num_computed), strict=True):
            count = min(dead, len(table))
            table[:count] = [NULL_BLOCK] * count

    @rule(request=requests)
    def free(self, request: str) -> None:
        self.manager.free(request)
        self.tables.pop(request, None)
        self.num_tokens.pop(request, None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.tables)))
        lease = f"lease{self.num_leases}"
        self.num_leases += 1
        self.manager.lease(request, lease)
        self.leases[lease] = self.tables.pop(request)
        del self.num_tokens[request]

    @rule(number=st.integers(0, 5))
    def release(self, number: int) -> None:
        self.manager.release(f"lease{number}")
        self.leases.pop(f"lease{number}", None)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.manager.check_integrity()
        for request, tables in self.tables.items():
            assert self.manager.block_tables(request) == tuple(tuple(table) for table in tables)
        assert sorted(self.manager.leases) == sorted(self.leases)
        assert self.manager.pool.num_free_blocks == NUM_BLOCKS - 1 - self.num_blocks_in_use

    @invariant()
    def no_block_is_held_twice(self) -> None:
        everything = [*self.tables.values(), *self.leases.values()]
        in_use = [
            block for tables in everything for table in tables for block in table if block != NULL_BLOCK
        ]
        assert len(set(in_use)) == len(in_use)

    def teardown(self) -> None:
        for request in list(self.tables):
            self.manager.free(request)
        for lease in list(self.leases):
            self.manager.release(lease)
        self.manager.check_integrity()
        assert self.manager.pool.num_free_blocks == NUM_BLOCKS - 1


TestManagerWalk = ManagerWalk.TestCase
TestManagerWalk.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


def test_the_model_of_dead_blocks():
    """Window 6, block 4: with 9 computed the next token sees 4..9, so block 0 (rows 0..3) is dead."""
    assert [num_dead_blocks(WINDOW, n) for n in (0, 8, 9, 12, 13)] == [0, 0, 1, 1, 2]
    assert num_dead_blocks(None, 100) == 0
    # With 10 tokens in blocks of 3, the state after the last lies in block 3.
    assert [num_dead_blocks(2, n, 3) for n in (0, 1, 3, 4, 9, 10)] == [0, 0, 0, 1, 2, 3]


def test_the_model_of_dead_blocks_of_chunks():
    """Chunks of 8 and of 6 positions, blocks of 4: of the latter's second, block 1 holds the first row."""
    assert [num_dead_blocks(None, n, BLOCK, 8) for n in (0, 7, 8, 9, 15, 16)] == [0, 0, 2, 2, 2, 4]
    assert [num_dead_blocks(None, n, BLOCK, 6) for n in (5, 6, 7, 11, 12, 13, 18)] == [0, 1, 1, 1, 3, 3, 4]


@pytest.mark.parametrize("num_tokens", [8, 16, 24, 48])
def test_a_request_that_arrives_where_chunks_begin_holds_nothing_of_them(num_tokens: int):
    """And goes on: its next token takes a block; the chunk that it begins is given back at its own end."""
    group = KVCacheGroup(0, chunked(CHUNK), (0,), 1)
    manager = KVCacheManager([group], 4)
    first = num_tokens // BLOCK
    assert manager.reserve_live("a", num_tokens) == ((0, (NULL_BLOCK,) * first),)
    assert manager.pool.num_free_blocks == 3
    manager.check_integrity()
    assert manager.extend("a", num_tokens) == ((first, ()),), "no token, no block"
    in_use = []
    for computed in range(num_tokens, num_tokens + 2 * CHUNK):
        updates = manager.extend("a", computed + 1)
        assert updates is not None
        ((start, ids),) = updates
        assert len(ids) == (1 if computed % BLOCK == 0 else 0), computed
        assert start == (computed if ids else computed + BLOCK) // BLOCK
        manager.trim("a", computed + 1)
        manager.check_integrity()
        in_use.append(3 - manager.pool.num_free_blocks)
    assert in_use == [1, 1, 1, 1, 2, 2, 2, 0] * 2
    # The rows of an odd chunk that begin inside a block are there, and no block before it.
    odd = KVCacheManager([KVCacheGroup(0, chunked(ODD_CHUNK), (0,), 1)], 4)
    assert odd.reserve_live("a", ODD_CHUNK) == ((0, (NULL_BLOCK, 1)),)
    assert odd.extend("a", ODD_CHUNK + 1) == ((2, ()),)


def test_blocks_of_chunks_that_are_over_are_another_requests():
    """Two requests of three chunks in a pool with room for one of each: every chunk is given back."""
    manager = KVCacheManager([KVCacheGroup(0, chunked(CHUNK), (0,), 1)], 1 + 4)
    for computed in range(3 * CHUNK):
        for request in ("a", "b"):
            assert manager.extend(request, computed + 1) is not None, computed
            manager.trim(request, computed + 1)
    assert manager.pool.num_free_blocks == 4
    full_manager = KVCacheManager([KVCacheGroup(0, full(BLOCK), (0,), 1)], 1 + 4)
    assert full_manager.extend("a", 3 * CHUNK) is None


def test_a_growing_table_stays_consecutive():
    manager = KVCacheManager(GROUPS[:1], 40)
    manager.extend("a", 9)
    (table,) = manager.block_tables("a")
    assert table == (1, 2, 3)
    assert manager.extend("a", 12) == ((3, ()),)
    assert manager.extend("a", 17) == ((3, (4, 5)),)


def test_short_of_blocks_changes_nothing():
    """One block too few in the last group: the first groups must not have taken theirs."""
    manager = KVCacheManager(GROUPS[:3], 9)
    assert manager.extend("a", 5) is not None
    before = manager.block_tables("a")
    assert manager.extend("a", 9) is None
    assert manager.extend("b", 1) is None
    assert manager.reserve_live("b", 1) is None
    assert manager.block_tables("a") == before
    assert manager.pool.num_free_blocks == 2
    with pytest.raises(KeyError):
        manager.block_tables("b")


def test_leased_blocks_are_not_reused_before_release():
    manager = KVCacheManager(GROUPS[:1], 4)
    manager.extend("a", 12)
    manager.lease("a", "lease")
    assert manager.leases == ("lease",)
    manager.free("a")
    assert manager.extend("b", 1) is None
    manager.release("lease")
    manager.release("lease")
    assert manager.extend("b", 12) == ((0, (1, 2, 3)),)
    assert not manager.leases


def test_a_lease_id_is_used_once():
    manager = KVCacheManager(GROUPS[:1], 9)
    manager.extend("a", 1)
    manager.extend("b", 1)
    manager.lease("a", "lease")
    with pytest.raises(AssertionError, match="lease lease exists"):
        manager.lease("b", "lease")


def test_reserving_twice_is_a_bug():
    manager = KVCacheManager(GROUPS[:1], 9)
    manager.reserve_live("a", 3)
    with pytest.raises(AssertionError, match="has blocks already"):
        manager.reserve_live("a", 3)


@each("chunk", [1, 3, 4, 7, 64])
@each("num_tokens", [1, 5, 8, 30, 41])
def test_max_request_blocks_is_enough_and_no_more(num_tokens: int, chunk: int):
    """Prefill in chunks of any size up to `chunk`, computed and trimmed as engines do; the worst start."""
    manager = KVCacheManager(GROUPS, 200)
    promised = manager.max_request_blocks(num_tokens, chunk)
    peak = 0
    for first in range(1, min(chunk, num_tokens) + 1):
        computed, size = 0, first
        while computed < num_tokens:
            size = min(size, num_tokens - computed)
            assert manager.extend("a", computed + size) is not None
            peak = max(peak, 199 - manager.pool.num_free_blocks)
            computed += size
            manager.trim("a", computed)
            manager.check_integrity()
            size = chunk
        manager.free("a")
    assert peak <= promised <= peak + len(GROUPS)
    assert KVCacheManager(GROUPS[:1], 9).max_request_blocks(num_tokens, chunk) == -(-num_tokens // BLOCK)


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
def test_max_request_blocks_of_chunks_is_the_peak(chunk: int):
    """Long requests prefilled from every start: no block more is asked for than some of them need."""
    for spec in (chunked(CHUNK), chunked(ODD_CHUNK)):
        manager = KVCacheManager([KVCacheGroup(0, spec, (0,), 1)], 200)
        peak = 0
        for first in range(1, min(chunk, 12) + 1):
            computed, size = 0, first
            while computed < 100:
                assert manager.extend("a", computed + size) is not None
                peak = max(peak, 199 - manager.pool.num_free_blocks)
                computed += size
                manager.trim("a", computed)
                size = chunk
            manager.free("a")
        assert peak == manager.max_request_blocks(100 + chunk, chunk)


def test_integrity_check_sees_damage():
    manager = KVCacheManager(GROUPS[:1], 9)
    manager.extend("a", 8)
    manager.pool.share([1])
    with pytest.raises(AssertionError, match="block 1: references differ"):
        manager.check_integrity()
