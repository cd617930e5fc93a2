"""The prefix cache against a brute-force model: a memory that knows, of every row that was written, all
tokens up to it. What is found must hold what it stands for, and everything that could be found must be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import FoundPrefix, HeldPrefix, KVCacheManager
from rayk.kv.prefix_cache import PrefixKeys
from rayk.kv.specs import KVCacheSpec
from tests.kv.brute import chunked, full, mamba1, mamba2, mla, sliding

Tokens = tuple[int, ...]
NUM_BLOCKS = 40
MAX_TOKENS = 60
SECRET = b"which names outlive a process by"


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


def rows_of(g: KVCacheGroup, block: int) -> range:
    """Positions whose content a block keeps."""
    size = g.spec.block_size
    stop = (block + 1) * size
    return range(block * size, stop) if g.spec.has_token_rows else range(stop - 1, stop)


class CacheWalk(RuleBasedStateMachine):
    """Requests r0..r4 over two tokens' worth of vocabulary, so that many share prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: tuple[KVCacheGroup, ...] = MODELS[0]
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
        held = self.manager.find_held(request, prompt, n, unit)
        assert held.num_tokens == self.best_held(prompt, unit)
        before = self.manager.pool.num_free_blocks
        updates = self.manager.reserve_live(request, n, held)
        if updates is None:
            assert self.manager.pool.num_free_blocks == before
            self.manager.free(request)
            return
        fresh = []
        for g, (start, ids) in zip(self.groups, updates, strict=True):
            assert start == 0
            here = held.blocks[g.index]
            self.check_rows(g, ids, prompt, n, stop=held.num_tokens)
            fresh += [b for b in ids if b != NULL_BLOCK and b not in here]
        self.hand_out(fresh)
        self.tokens[request], self.num_computed[request] = prompt, n
        self.arrived[request] = n
        for g, (_, ids) in zip(self.groups, updates, strict=True):
            for layer in g.layers:
                live = g.seen_by(layer).live_rows(n)
                for row in range(max(live.start, held.num_tokens), live.stop):
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
        held=st.sampled_from([0, 0, 0, 3, 8, 12, 24]),
        is_taken=st.sampled_from([True, True, False]),
        which=st.integers(0, 9),
    )
    def search_all_places(
        self, request: str, prompt: Tokens, limit: int, held: int, is_taken: bool, which: int
    ) -> None:
        """A prefix is found here and elsewhere, and brought here from there."""
        if request in self.tokens:
            return
        if which < len(self.written):
            prompt = self.written[which] + prompt[:3]
        most = max(0, len(prompt) - limit * (limit % 2))
        self.learn_keys(prompt)
        found = self.manager.find_prefix(request, prompt, most, held, self.is_on_disk)
        best = self.best_prefix(prompt, most, held)
        self.check_found(found, prompt, best, held)
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
            self.check_rows(g, table, prompt, best, start=held)
        self.tokens[request], self.num_computed[request] = prompt[:best], best
        self.manager.remember(request, prompt, best)
        self.name(request)
        if held:
            self.leases[self.put_aside(request)] = None

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        self.put_aside(data.draw(st.sampled_from(sorted(self.tokens))))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), is_back=st.booleans())
    def release(self, data: st.DataObject, is_back: bool) -> None:
        """A lease ends, or its blocks are a request's again, who goes on."""
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        kept = self.leases.pop(lease)
        if not is_back or kept is None:
            self.manager.release(lease)
            return
        name = f"back from {lease}"
        self.manager.unlease(lease, name)
        self.tokens[name], self.num_computed[name], self.arrived[name] = kept

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

    def disk_has(self, g: KVCacheGroup, tokens: Tokens, index: int, n: int, held: int) -> bool:
        """Whether the block on disk at this place holds all that is wanted of it."""
        size = g.spec.block_size
        since = self.disk.get((g.index, tokens[: (index + 1) * size]))
        if since is None:
            return False
        return not since or all(
            row >= since[g.lanes.index(g.seen_by(layer))]
            for layer in g.layers
            for row in g.seen_by(layer).live_rows(n)
            if index * size <= row < (index + 1) * size and row >= held
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

    def has_block(self, g: KVCacheGroup, tokens: Tokens, index: int, n: int, held: int) -> bool:
        """Whether the block here at this place holds all that is wanted of it to go on from n tokens."""
        size = g.spec.block_size
        in_block = range(index * size, (index + 1) * size)
        return all(
            self.is_named(g, layer, tokens, [row])
            for layer in g.layers
            for row in g.seen_by(layer).live_rows(n)
            if row in in_block and row >= held
        )

    def wanted_blocks(self, g: KVCacheGroup, n: int, held: int) -> list[int]:
        rows = {row for layer in g.layers for row in g.seen_by(layer).live_rows(n) if row >= held}
        return sorted({row // g.spec.block_size for row in rows})

    def best_prefix(self, tokens: Tokens, most: int, held: int) -> int:
        for n in range(most, held, -1):
            if all(
                n % g.spec.block_size == 0
                and all(
                    self.has_block(g, tokens, index, n, held) or self.disk_has(g, tokens, index, n, held)
                    for index in self.wanted_blocks(g, n, held)
                )
                for g in self.groups
            ):
                return n if self.is_caching else 0
        return 0

    def check_found(self, found: FoundPrefix, tokens: Tokens, best: int, held: int) -> None:
        """The longest prefix, all its blocks, and those missing that are not here."""
        assert found.num_tokens == best
        if not best:
            assert found == FoundPrefix(0, tuple(() for _ in self.groups), ())
            return
        missing = []
        for g, table in zip(self.groups, found.tables, strict=True):
            wanted = self.wanted_blocks(g, best, held)
            gone = [i for i in wanted if not self.has_block(g, tokens, i, best, held)]
            missing += [(g.index, i, tokens[: (i + 1) * g.spec.block_size]) for i in gone]
            here = [i for i, block in enumerate(table) if block != NULL_BLOCK]
            assert here == [i for i in wanted if i not in gone]
            for i in here:
                assert table[i] == self.named[g.index, tokens[: (i + 1) * g.spec.block_size]]
        assert [(group, i, self.tokens_of[key]) for group, i, key in found.missing] == missing

    def best_held(self, tokens: Tokens, unit: int) -> int:
        for n in range(len(tokens) // unit * unit, 0, -unit):
            live = [(g, i, g.seen_by(i).live_rows(len(tokens))) for g in self.groups for i in g.layers]
            if all(
                self.is_named(g, layer, tokens[:n], range(rows.start, min(n, rows.stop)))
                for g, layer, rows in live
            ):
                return n if self.is_caching else 0
        return 0


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
    assert manager.find_held("b", (1,) * 9, 9, 4) == HeldPrefix(0, ((),))


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
    assert manager.find_held("b", (1,) * 8 + (3,) * 4, 12, 4) == HeldPrefix(8, (blocks[:2], ()))
    assert manager.find_held("c", first, 12, 4) == HeldPrefix(12, (blocks, manager.block_tables("a")[1]))


def test_blocks_of_which_only_some_rows_arrived_serve_those_who_need_no_more() -> None:
    """Of 22 tokens whose last 5 rows alone are seen by one of two layers, and came for it."""
    manager = KVCacheManager((group(0, full(4), (full(4), sliding(6))),), NUM_BLOCKS, prefix_caching=True)
    tokens = tuple(range(22))
    assert manager.reserve_live("came", 22) is not None
    manager.remember("came", tokens, 22)
    (came,) = manager.block_tables("came")
    assert manager.find_held("again", tokens, 22, 4) == HeldPrefix(20, (came[:5],))
    assert manager.find_held("row 16 is seen", tokens[:21], 21, 4) == HeldPrefix(16, (came[:4],))
    assert manager.find_held("no row of these", tokens[:17], 17, 4) == HeldPrefix(12, (came[:3],))
    assert manager.match("rows 15 and on", tokens, 21) == 0
    assert manager.extend("computed", 22) is not None
    manager.remember("computed", tokens, 22)
    (computed,) = manager.block_tables("computed")
    assert manager.match("rows 15 and on", tokens, 21) == 20
    assert manager.block_tables("rows 15 and on") == (computed[:5],)
    assert manager.reserve_live("comes later", 22) is not None
    manager.remember("comes later", tokens, 22)
    assert manager.find_held("again", tokens, 22, 4).blocks == (computed[:5],), "which hold more"
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
