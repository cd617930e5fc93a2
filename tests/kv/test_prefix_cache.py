"""The prefix cache against a brute-force model: a memory that knows, of every row that was written, all
tokens up to it. What is found must hold what it stands for, and everything that could be found must be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager, LocalPrefix
from rayk.kv.prefix_cache import PrefixKeys
from rayk.kv.specs import KVCacheSpec
from tests.kv.brute import chunked, full, mamba1, mamba2, mla, sliding
from tests.kv.cache_model import MAX_TOKENS, SECRET, CacheModel, Tokens, rows_of

NUM_BLOCKS = 40


def group(index: int, spec: KVCacheSpec, seen: Sequence[KVCacheSpec] = ()) -> KVCacheGroup:
    """Of two layers; `seen`: what each of them sees."""
    return KVCacheGroup(index, spec, (2 * index, 2 * index + 1), 2, tuple(seen))


def groups(*specs: KVCacheSpec) -> tuple[KVCacheGroup, ...]:
    return tuple(group(i, spec) for i, spec in enumerate(specs))


MODELS = (
    groups(full(4)),
    groups(full(4), sliding(6)),
    groups(sliding(1), sliding(9, full(2))),
    groups(full(4), chunked(8), chunked(6)),
    groups(chunked(10, full(3)), full(6)),
    groups(mla(3), mla(6)),
    groups(full(4), mamba2(block_size=8)),
    groups(full(6), mamba2(block_size=4), sliding(5, full(2))),
    groups(mamba1(block_size=5)),
    groups(full(4), mamba2(block_size=1000)),
    (group(0, full(4), (full(4), sliding(6))), group(1, sliding(9))),
    (group(0, full(4), (chunked(8), sliding(5))), group(1, full(6), (full(6), chunked(10, full(6))))),
    (group(0, full(4), (sliding(3), sliding(9))),),
)


class CacheWalk(CacheModel):
    """Requests r0..r4 over two tokens' worth of vocabulary, so that many share prefixes."""

    @initialize(model=st.sampled_from(MODELS), caching=st.integers(0, 9))
    def form(self, model: tuple[KVCacheGroup, ...], caching: int) -> None:
        self.groups = model
        self.manager = KVCacheManager(model, NUM_BLOCKS, prefix_caching=caching > 0, secret=SECRET)
        self.is_caching = caching > 0

    requests = st.sampled_from([f"r{i}" for i in range(5)])
    # Mostly one of few beginnings, so that long ones come again.
    prompts = st.tuples(
        st.integers(0, MAX_TOKENS), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.booleans()
    ).map(lambda drawn: ((7,) * drawn[0] if drawn[2] else (7, 8, 9) * (drawn[0] // 3)) + tuple(drawn[1]))

    @rule(request=requests, prompt=prompts, limit=st.integers(0, 9))
    def admit(self, request: str, prompt: Tokens, limit: int) -> None:
        """A request begins with what is cached, or finds no room to go on."""
        if request in self.tokens:
            return
        most = max(0, len(prompt) - 1 - limit * (limit % 2))
        found = self.manager.match(request, prompt, most)
        assert found == self.best_hit(prompt, most)
        if found:
            tables = self.manager.block_tables(request)
            for g, table in zip(self.groups, tables, strict=True):
                assert len(table) == found // g.spec.block_size
                self.check_rows(g, table, prompt, found)
        self.tokens[request], self.num_computed[request] = prompt, found
        if not self.compute(request, 1):
            if found:
                self.manager.unmatch(request)
            self.manager.free(request)
            self.forget(request)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(1, 23), generated=st.integers(0, 2))
    def go_on(self, data: st.DataObject, more: int, generated: int) -> None:
        """A chunk of the prompt, or an output token."""
        request = data.draw(st.sampled_from(sorted(self.tokens)))
        if self.num_computed[request] == len(self.tokens[request]):
            self.tokens[request] += (generated,)
        self.compute(request, min(more, len(self.tokens[request]) - self.num_computed[request]))

    @rule(request=requests, prompt=prompts, unit=st.sampled_from([1, 2, 4, 12]))
    def arrive(self, request: str, prompt: Tokens, unit: int) -> None:
        """A request's live rows come from elsewhere, those aside that are here."""
        if request in self.tokens:
            return
        n = len(prompt)
        sizes = [g.spec.block_size for g in self.groups if g.spec.has_token_rows]
        unit = math.lcm(unit, *sizes)
        local_prefix = self.manager.find_local_prefix(request, prompt, n, unit)
        assert local_prefix.num_tokens == self.longest_local(prompt, unit)
        before = self.manager.pool.num_free_blocks
        updates = self.manager.reserve_live(request, n, local_prefix)
        if updates is None:
            assert self.manager.pool.num_free_blocks == before
            self.manager.free(request)
            return
        fresh = []
        for g, (start, ids) in zip(self.groups, updates, strict=True):
            assert start == 0
            here = local_prefix.blocks[g.index]
            self.check_rows(g, ids, prompt, n, stop=local_prefix.num_tokens)
            fresh += [b for b in ids if b != NULL_BLOCK and b not in here]
        self.hand_out(fresh)
        self.tokens[request], self.num_computed[request] = prompt, n
        self.arrived[request] = n
        for g, (_, ids) in zip(self.groups, updates, strict=True):
            for layer in g.layers:
                live = g.seen_by(layer).live_rows(n)
                for row in range(max(live.start, local_prefix.num_tokens), live.stop):
                    self.write(g, layer, ids, row, prompt)
        self.manager.remember(request, prompt, n)
        self.name(request)

    @rule(request=requests)
    def free(self, request: str) -> None:
        self.manager.free(request)
        self.forget(request)

    @rule(prompt=prompts, data=st.data())
    def write_to_disk(self, prompt: Tokens, data: st.DataObject) -> None:
        """Blocks of a sequence lie in another place, all or all but some."""
        blocks = [
            (g.index, prompt[:end])
            for g in self.groups
            for end in range(g.spec.block_size, len(prompt) + 1, g.spec.block_size)
        ]
        lost = data.draw(st.sets(st.sampled_from(blocks), max_size=3)) if blocks else set()
        for g, prefix in (pair for pair in blocks if pair not in lost):
            group = self.groups[g]
            is_partial = group.spec.has_token_rows and data.draw(st.integers(0, 5)) == 0
            ends = st.integers(len(prefix) - group.spec.block_size, len(prefix))
            drawn = tuple(data.draw(ends) for _ in group.lanes) if is_partial else ()
            self.disk[g, prefix] = drawn
        self.written.append(prompt)

    @rule(
        request=requests,
        prompt=prompts,
        limit=st.integers(0, 9),
        num_local=st.sampled_from([0, 0, 0, 3, 8, 12, 24]),
        is_taken=st.sampled_from([True, True, False]),
        which=st.integers(0, 9),
    )
    def search_all_places(
        self, request: str, prompt: Tokens, limit: int, num_local: int, is_taken: bool, which: int
    ) -> None:
        """A prefix is found here and elsewhere, and brought here from there."""
        if request in self.tokens:
            return
        if which < len(self.written):
            prompt = self.written[which] + prompt[:3]
        most = max(0, len(prompt) - limit * (limit % 2))
        self.learn_keys(prompt)
        found = self.manager.find_prefix(request, prompt, most, num_local, self.is_on_disk)
        best = self.best_prefix(prompt, most, num_local)
        self.check_found(found, prompt, best, num_local)
        if not best or not is_taken:
            self.manager.free(request)
            return
        num_free = self.manager.pool.num_free_blocks
        tables = self.manager.adopt(request, found)
        if tables is None:
            here = {b for table in found.tables for b in table if b != NULL_BLOCK}
            assert num_free - sum(not self.manager.pool.references(b) for b in here) < len(found.missing)
            assert self.manager.pool.num_free_blocks == num_free
            self.manager.free(request)
            return
        self.hand_out([tables[group][index] for group, index, _ in found.missing])
        for group, index, _ in found.missing:
            g = self.groups[group]
            since = self.disk[group, prompt[: (index + 1) * g.spec.block_size]]
            for layer, row in itertools.product(g.layers, rows_of(g, index)):
                if not since or row >= since[g.lanes.index(g.seen_by(layer))]:
                    self.write(g, layer, tables[group], row, prompt)
        for g, table in zip(self.groups, tables, strict=True):
            assert len(table) == best // g.spec.block_size
            self.check_rows(g, table, prompt, best, start=num_local)
        self.tokens[request], self.num_computed[request] = prompt[:best], best
        self.manager.remember(request, prompt, best)
        self.name(request)
        if num_local:
            self.leases[self.put_aside(request)] = None

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        self.put_aside(data.draw(st.sampled_from(sorted(self.tokens))))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease]
        self.manager.release(lease)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), is_whole=st.booleans())
    def share(self, data: st.DataObject, is_whole: bool) -> None:
        """A lease holds what lives after some tokens of a request that goes on."""
        request = data.draw(st.sampled_from(sorted(self.tokens)))
        num_computed = self.num_computed[request]
        n = data.draw(st.integers(1, num_computed)) if num_computed else 1
        n = n // 12 * 12 or n if is_whole else n
        lease = f"lease{self.num_leases}"
        self.num_leases += 1
        tokens, tables = self.tokens[request], self.manager.block_tables(request)
        before = self.manager.ledger
        shared = self.manager.share_lease(request, lease, n)
        if shared is None:
            # Of what arrived the manager knows what it had to bring, not what was here.
            assert not self.is_there(tables, tokens, n) or n < self.arrived.get(request, 0)
            assert self.manager.ledger == before
            assert lease not in self.manager.leases
            return
        assert n <= num_computed
        assert self.is_there(tables, tokens, n)
        for g, table, part in zip(self.groups, tables, shared, strict=True):
            live = [row for layer in g.layers for row in g.seen_by(layer).live_rows(n)]
            stop = -(-n // g.spec.block_size)
            first = min(live) // g.spec.block_size if live else stop
            assert part == (NULL_BLOCK,) * first + table[first:stop]
        self.shares[lease] = tokens[:n], n, [list(t) for t in shared]

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def end_share(self, data: st.DataObject) -> None:
        """What was shared is as it was, whatever the request did since."""
        lease = data.draw(st.sampled_from(sorted(self.shares)))
        tokens, n, tables = self.shares.pop(lease)
        for g, table in zip(self.groups, tables, strict=True):
            self.check_rows(g, table, tokens, n)
        self.manager.release(lease)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for request in list(self.tokens):
                self.manager.free(request)
            for lease in list(self.shares):
                tokens, n, tables = self.shares.pop(lease)
                for g, table in zip(self.groups, tables, strict=True):
                    self.check_rows(g, table, tokens, n)
                self.manager.release(lease)
            for lease in self.leases:
                self.manager.release(lease)
            assert self.manager.ledger.num_held == 0
            assert self.manager.pool.num_free_blocks == NUM_BLOCKS - 1
            self.manager.check_integrity()
            assert not self.manager._keys, "of requests that are gone"

    def compute(self, request: str, count: int) -> bool:
        """Compute so many tokens if blocks allow."""
        tokens, start = self.tokens[request], self.num_computed[request]
        updates = self.manager.extend(request, start + count)
        if updates is None:
            return False
        self.hand_out([block for _, ids in updates for block in ids])
        tables = self.manager.block_tables(request)
        for g, table in zip(self.groups, tables, strict=True):
            if start:
                self.check_rows(g, table, tokens, start)
            for layer in g.layers:
                for row in range(start, start + count):
                    self.write(g, layer, table, row, tokens)
        self.num_computed[request] = start + count
        self.manager.remember(request, tokens, start + count)
        self.name(request, start)
        self.manager.trim(request, start + count)
        return True


TestCacheWalk = CacheWalk.TestCase
# Shrinking what fails would take minutes.
TestCacheWalk.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
)


def test_nothing_is_held_without_caching() -> None:
    manager = KVCacheManager(MODELS[0], NUM_BLOCKS)
    assert manager.extend("a", 8) is not None
    manager.remember("a", (1,) * 8, 8)
    manager.free("a")
    assert manager.match("b", (1,) * 9, 8) == 0
    assert manager.find_local_prefix("b", (1,) * 9, 9, 4) == LocalPrefix(0, ((),))


def test_keys_depend_on_every_token_and_on_nothing_else() -> None:
    """All sequences of 6 tokens: no two prefixes share a key, whatever the steps they were hashed in."""
    seen: dict[bytes, Tokens] = {}
    for tokens in itertools.product((0, 1, 256), repeat=6):
        whole, stepwise = PrefixKeys((2, 3)), PrefixKeys((2, 3))
        whole.extend(tokens, 6)
        for n in range(7):
            stepwise.extend(tokens, n)
        for n in (2, 3, 4, 6):
            assert whole[n] == stepwise[n]
            assert seen.setdefault(whole[n], tokens[:n]) == tokens[:n]
    assert len(seen) == sum(3**n for n in (2, 3, 4, 6))


def test_a_state_that_is_missing_does_not_hide_what_needs_none() -> None:
    """Of 12 tokens that come from elsewhere 8 are here; the only state wanted is that after the 12th."""
    manager = KVCacheManager(groups(full(4), mamba2(block_size=12)), NUM_BLOCKS, prefix_caching=True)
    first = (1,) * 8 + (2,) * 4
    assert manager.extend("a", 12) is not None
    manager.remember("a", first, 12)
    blocks = manager.block_tables("a")[0]
    assert manager.find_local_prefix("b", (1,) * 8 + (3,) * 4, 12, 4) == LocalPrefix(8, (blocks[:2], ()))
    assert manager.find_local_prefix("c", first, 12, 4) == LocalPrefix(
        12, (blocks, manager.block_tables("a")[1])
    )


def test_blocks_of_which_only_some_rows_arrived_serve_those_who_need_no_more() -> None:
    """Of 22 tokens whose last 5 rows alone are seen by one of two layers, and came for it."""
    manager = KVCacheManager((group(0, full(4), (full(4), sliding(6))),), NUM_BLOCKS, prefix_caching=True)
    tokens = tuple(range(22))
    assert manager.reserve_live("came", 22) is not None
    manager.remember("came", tokens, 22)
    (came,) = manager.block_tables("came")
    assert manager.find_local_prefix("again", tokens, 22, 4) == LocalPrefix(20, (came[:5],))
    assert manager.find_local_prefix("row 16 is seen", tokens[:21], 21, 4) == LocalPrefix(16, (came[:4],))
    assert manager.find_local_prefix("no row of these", tokens[:17], 17, 4) == LocalPrefix(12, (came[:3],))
    assert manager.match("rows 15 and on", tokens, 21) == 0
    assert manager.extend("computed", 22) is not None
    manager.remember("computed", tokens, 22)
    (computed,) = manager.block_tables("computed")
    assert manager.match("rows 15 and on", tokens, 21) == 20
    assert manager.block_tables("rows 15 and on") == (computed[:5],)
    assert manager.reserve_live("comes later", 22) is not None
    manager.remember("comes later", tokens, 22)
    assert manager.find_local_prefix("again", tokens, 22, 4).blocks == (computed[:5],), "which hold more"
    for request in ("came", "computed", "rows 15 and on", "comes later"):
        manager.free(request)
        manager.check_integrity()
    assert sum(map(manager.pool.is_kept, range(NUM_BLOCKS))) == 5


def test_a_block_in_two_halves_is_none() -> None:
    """Of two lanes one has its rows here and the other elsewhere, and no block has both: neither counts."""
    spec = full(4)
    both = group(0, spec, (spec, sliding(6)))
    manager = KVCacheManager([both], 20, prefix_caching=True, secret=SECRET)
    tokens = tuple(range(12))
    manager.reserve_live("came", 12)  # the window's layer has rows 7 to 11 only
    manager.remember("came", tokens, 12)
    manager.free("came")
    assert manager.find_prefix("all", tokens, 12).num_tokens == 12
    halves = {8: (8, 0), 4: (4, 0)}  # elsewhere, of the other layer none
    keys = PrefixKeys({4}, SECRET)
    keys.extend(tokens, 12)
    ends = {keys[n]: n for n in (4, 8, 12)}

    def elsewhere(_: int, key: bytes) -> tuple[int, ...] | None:
        return halves.get(ends[key])

    # After 8 tokens the window wants rows 3 to 7: those of the second block are elsewhere alone.
    assert manager.find_prefix("eight", tokens, 8, 0, elsewhere).num_tokens == 0
    halves[8] = halves[4] = ()
    assert manager.find_prefix("eight", tokens, 8, 0, elsewhere).num_tokens == 8


def test_rows_that_an_adopted_block_lacks_are_shared_with_nobody() -> None:
    """Of 24 tokens the last window's rows alone came, to another place: whoever goes back needs more."""
    lanes = (group(0, full(4), (full(4), sliding(6))),)
    manager = KVCacheManager(lanes, NUM_BLOCKS, prefix_caching=True, secret=SECRET)
    tokens = tuple(range(24))
    keys = PrefixKeys((4,), SECRET)
    keys.extend(tokens, 24)
    names = [keys[end] for end in range(4, 25, 4)]
    since = {key: (0, min(19, end)) for key, end in zip(names, range(4, 25, 4), strict=True)}
    since[names[5]] = ()
    found = manager.find_prefix("a", tokens, 24, elsewhere=lambda group, key: since.get(key))
    assert found.num_tokens == 24
    assert found.missing == tuple((0, index, key) for index, key in enumerate(names))
    (table,) = manager.adopt("a", found) or ()
    manager.remember("a", tokens, 24)
    assert manager.share_lease("a", "needs rows 15 to 18", 20) is None
    assert manager.share_lease("a", "has all", 24) == (table,)
    assert manager.share_lease("a", "too long", 25) is None
    assert manager.find_prefix("b", tokens, 23).num_tokens == 0, "nor found"
    assert manager.match("c", tokens, 24) == 24
    assert manager.share_lease("c", "as little", 20) is None
    assert manager.holders(table) == dict.fromkeys(table, "c"), "a request before a lease"
    assert manager.leases == ("has all",)
    manager.check_integrity()


def test_adopting_where_blocks_are_short_changes_nothing() -> None:
    """What is found must not make room for what is missing."""
    manager = KVCacheManager(groups(full(4)), 5, prefix_caching=True)
    tokens = tuple(range(16))
    assert manager.extend("a", 8) is not None
    manager.remember("a", tokens, 8)
    (here,) = manager.block_tables("a")
    manager.free("a")
    assert manager.extend("b", 4) is not None
    found = manager.find_prefix("c", tokens, 16, elsewhere=lambda group, key: ())
    assert (found.num_tokens, found.tables) == (16, ((*here, NULL_BLOCK, NULL_BLOCK),))
    assert manager.adopt("c", found) is None
    assert (manager.pool.num_free_blocks, manager.pool.num_cached_blocks) == (3, 2)
    manager.free("b")
    tables = manager.adopt("c", found)
    assert tables is not None
    assert tables[0][:2] == here
    assert manager.pool.num_free_blocks == 0
    manager.check_integrity()
