"""Grouping: the published cases, what must hold whatever the model, and that no other grouping costs less."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.kv.groups import (
    BLOCK_COST_BYTES,
    REFERENCE_TOKENS,
    SLACK,
    CacheKey,
    KVCacheGroup,
    group_layers,
    measure_waste,
    unify_pages,
    waste_tokens,
    wasted_bytes,
)
from rayk.kv.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    Mamba1Spec,
    SlidingWindowSpec,
    num_kept_blocks,
    page_bytes,
    with_block_size,
)
from tests.kv.brute import chunked, full, gdn, keyed, mamba1, mamba2, mla, sliding

Specs = dict[CacheKey, KVCacheSpec]


def attention(kv_heads: int = 8, window: int | None = None) -> KVCacheSpec:
    """Heads of 128 in bfloat16, blocks of 16: 4096 bytes per token with 8 heads."""
    settings = (16, kv_heads, 128, 128, "bfloat16", 32)
    return FullAttentionSpec(*settings) if window is None else SlidingWindowSpec(*settings, window)


def model(num_full: int, num_sliding: int, window: int = 512) -> Specs:
    return keyed(
        {i: attention(window=None if i < num_full else window) for i in range(num_full + num_sliding)}
    )


def published_positions(counts: list[int]) -> int:
    """vLLM's rule: as many as the rarest kind has layers, or as the commonest if it has few more."""
    low, high = min(counts), max(counts)
    return high if high < 1.5 * low else low


def dealt(specs: Specs, positions: int) -> tuple[KVCacheGroup, ...]:
    """The grouping with so many positions, dealt and its pages grown by hand."""
    kinds: dict[KVCacheSpec, list[int]] = {}
    for key in sorted(specs):
        kinds.setdefault(specs[key], []).append(key[0])
    hands: list[list[tuple[int, ...]]] = []
    for layers in kinds.values():
        num_groups = -(-len(layers) // positions)
        hands.append([tuple(layers[first::num_groups]) for first in range(num_groups)])
    best: tuple[KVCacheGroup, ...] = ()
    for limit in limits(list(kinds)):
        groups = tuple(
            KVCacheGroup(0, grown_below(spec, limit), hand, positions)
            for spec, dealt_out in zip(kinds, hands, strict=True)
            for hand in dealt_out
        )
        if not best or brute_cost(groups) < brute_cost(best):
            best = groups
    return best


def limits(specs: list[KVCacheSpec]) -> list[int]:
    """Pages that blocks may grow to: the largest, or that of some kind's first factor to reach it."""
    largest = max(page_bytes(spec) for spec in specs)
    found = {largest}
    for spec in specs:
        if spec.part == "attention":
            found.add(next(n * page_bytes(spec) for n in count(1) if n * page_bytes(spec) >= largest))
    return sorted(found)


def grown_below(spec: KVCacheSpec, limit: int) -> KVCacheSpec:
    """A state as it is; attention with the most blocks in one that fit into `limit` bytes."""
    if spec.part == "state":
        return spec
    factor = next(n for n in count(1) if (n + 1) * page_bytes(spec) > limit)
    return with_block_size(spec, factor * spec.block_size)


def counted(specs: Specs) -> list[int]:
    """Layers of each kind."""
    return [list(specs.values()).count(spec) for spec in dict.fromkeys(specs.values())]


def brute_cost(groups: tuple[KVCacheGroup, ...]) -> int:
    """Bytes of a reference request, block by block, and the price of each block."""
    page = max(page_bytes(g.spec) for g in groups)
    return sum(touched_blocks(g.spec) * (g.num_positions * page + BLOCK_COST_BYTES) for g in groups)


@cache
def touched_blocks(spec: KVCacheSpec) -> int:
    """Blocks that a reference request holds rows in: at its end, or of chunks when they hold most rows."""
    moments = range(REFERENCE_TOKENS + 1) if spec.kind == "chunked" else [REFERENCE_TOKENS]
    fullest = max((len(spec.live_rows(n)), n) for n in moments)[1]
    return len({position // spec.block_size for position in spec.live_rows(fullest)})


def allocated_bytes(groups: tuple[KVCacheGroup, ...]) -> int:
    """Without the price of blocks."""
    return measure_waste(groups).allocated_bytes


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "size", "groups"),
    [(10, 20, 10, 3), (13, 12, 13, 2), (4, 0, 4, 1), (2, 4, 2, 3)],
)
def test_published_groupings(num_full: int, num_sliding: int, size: int, groups: int):
    specs = model(num_full, num_sliding)
    made = group_layers(specs)
    assert len(made) == groups
    assert {g.num_positions for g in made} == {size}
    assert [g.index for g in made] == list(range(groups))
    assert size == published_positions(counted(specs))


def test_published_dealing():
    """FIXTURES: 2 full + 3 sliding: (f0, f1) (s0, s2) (s1, pad), while pages are small."""
    groups = group_layers(keyed({0: full(), 1: full(), 2: sliding(9), 3: sliding(9), 4: sliding(9)}))
    assert [g.layers for g in groups] == [(0, 1), (2, 4), (3,)]
    assert [g.spec.kind for g in groups] == ["full", "sliding", "sliding"]
    assert [g.keys for g in groups] == [
        ((0, "attention"), (1, "attention")),
        ((2, "attention"), (4, "attention")),
        ((3, "attention"),),
    ]
    assert wasted_bytes(groups) == (0, 0, page_bytes(full()))


def test_a_wide_window_is_not_padded():
    """The same layers with pages of 64 KiB and 4096 tokens in view of all: a padding position would cost 256
    pages, 16 MiB; one layer per group costs 640 descriptors more, 5 MiB."""
    specs = model(2, 3, window=4096)
    groups = group_layers(specs)
    assert [g.layers for g in groups] == [(0,), (1,), (2,), (3,), (4,)]
    by_rule = dealt(specs, published_positions(counted(specs)))
    assert [len(g.layers) for g in by_rule] == [2, 2, 1]
    page = 16 * 4096
    # 4095 of the window's rows are alive: the oldest has just left it.
    assert measure_waste(groups).bytes == 3 * 4096
    assert measure_waste(by_rule).bytes == 256 * page + 3 * 4096


# (model, positions chosen, positions by vLLM's rule, waste of each in bytes); models by full and sliding
# layers and window, 4096 bytes per token and layer
BEATEN = [
    # 62 layers as gemma3 27B's: 11 groups of five, 3 positions short, against 6 of ten, 8 short.
    ((10, 52, 1024), 5, 10, 52 * 4096 + 3 * 64 * 65536, 52 * 4096 + 8 * 64 * 65536),
    # 26 layers as gemma3 1B's.
    ((4, 22, 512), 2, 4, 22 * 4096, 22 * 4096 + 2 * 32 * 65536),
]


@pytest.mark.parametrize(("layers", "ours", "theirs", "our_waste", "their_waste"), BEATEN, ids=str)
def test_beaten_groupings(
    layers: tuple[int, int, int], ours: int, theirs: int, our_waste: int, their_waste: int
):
    specs = model(*layers)
    groups = group_layers(specs)
    assert (groups[0].num_positions, published_positions(counted(specs))) == (ours, theirs)
    assert measure_waste(groups).bytes == our_waste
    assert measure_waste(dealt(specs, theirs)).bytes == their_waste


def test_grown_blocks():
    """Two pages of 224 bytes are one of 448, eleven of 40 fit into it; a state of 160 stays, though it would
    fit twice."""
    wide, state = full(head_k=32, head_v=13), mamba1(channels=16, state=1)
    assert [page_bytes(spec) for spec in (full(), wide, state)] == [40, 360, 160]
    groups = group_layers(keyed({0: full(), 1: wide, 2: state, 3: mla(latent=20, rope=8)}))
    assert [g.spec.block_size for g in groups] == [4 * 11, 4, 50, 4 * 2]
    assert [page_bytes(g.spec) for g in groups] == [440, 360, 160, 448]
    assert wasted_bytes(groups) == (8, 88, 288, 0)


def test_blocks_grow_beyond_a_state_where_padding_the_state_costs_less():
    """A state of two attention pages and a bit: two blocks leave the bit of every page empty, three most of a
    page, once per state."""
    spec = full(block_size=16, kv_heads=1, head_k=1024, head_v=1024, query_heads=1)
    state = Mamba1Spec(10**6, "int8", conv_width=2, num_channels=4, state_size=4500)
    assert (page_bytes(spec), page_bytes(state)) == (32768, 72004)
    groups = group_layers(keyed({0: spec, 1: state}))
    assert [g.spec.block_size for g in groups] == [48, 10**6]
    # 86 blocks of 48 tokens, the last not full, and one state in a page of 98304 bytes.
    assert measure_waste(groups).bytes == (86 * 48 - 4096) * 2048 + 98304 - 72004
    many = group_layers(keyed({0: spec} | dict.fromkeys(range(1, 61), state)))
    assert (many[0].spec.block_size, len(many)) == (32, 61)
    assert measure_waste(many).bytes == 128 * (72004 - 65536)


def test_waste_of_a_request_by_hand():
    """9 tokens: three blocks of 4 for the full layers, 3 rows empty; a window of 5 sees 4 rows in 2 blocks;
    one state."""
    specs = keyed({0: full(), 1: full(), 2: sliding(5), 3: sliding(5), 4: sliding(5)})
    groups = group_layers(specs)
    waste = measure_waste(groups, 9)
    assert waste.allocated_bytes == (3 + 2 + 2) * 2 * 40
    assert waste.needed_bytes == (9 * 2 + 4 * 3) * 10
    assert waste.bytes == 560 - 300
    assert waste.percent == pytest.approx(100 * 260 / 560)
    assert measure_waste(group_layers(keyed({7: gdn()})), 9).bytes == 0


def test_chunks_count_as_they_are_at_their_fullest():
    """4096 tokens are the end of a chunk of 512, when nothing of it lives: groups of four, which pad three
    positions of nine chunked layers, would then look as good as pairs, which pad one."""
    common = (16, 8, 128, 128, "bfloat16", 32)
    full_layers, chunk = FullAttentionSpec(*common), ChunkedLocalSpec(*common, 512)
    groups = group_layers(keyed({i: full_layers if i < 4 else chunk for i in range(13)}))
    assert [g.num_positions for g in groups] == [2] * 7
    assert [g.keys for g in groups] == [g.keys for g in group_layers(model(4, 9, window=512))]
    # In each chunk one row is still free: that of its last token.
    assert measure_waste(groups).bytes == 32 * 65536 + 9 * 4096
    fullest = [chunk.fullest_at(n) for n in (0, 1, 100, 511, 512, 4095, 4096, 5000)]
    assert [num_kept_blocks(chunk, n) for n in fullest] == [0, 1, 7, *[32] * 5]


def test_no_layers_no_groups():
    assert group_layers({}) == ()
    assert wasted_bytes(()) == ()
    assert measure_waste(()).percent == 0


def test_keys_must_name_the_specs_part():
    with pytest.raises(AssertionError, match="with a spec of state"):
        group_layers({(0, "attention"): mamba2()})


KINDS = [
    full(),
    sliding(3),
    sliding(800, full(dtype="float32")),
    chunked(64),
    chunked(600, full(dtype="float32")),
    full(kv_heads=4),
    attention(),
    mla(),
    mamba1(),
    mamba2(8, 24),
    gdn(),
]
specs_of_layers = st.dictionaries(
    st.tuples(st.integers(0, 40), st.sampled_from(KINDS)).map(lambda t: (t[0], t[1].part)),
    st.none(),
    min_size=1,
).flatmap(
    lambda keys: st.fixed_dictionaries(
        {key: st.sampled_from([k for k in KINDS if k.part == key[1]]) for key in keys}
    )
)
slow_but_sure = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@slow_but_sure
@given(specs_of_layers)
def test_every_layer_once_with_its_own_spec(specs: Specs):
    groups = group_layers(specs)
    assert sorted(key for g in groups for key in g.keys) == sorted(specs)
    assert len({g.num_positions for g in groups}) == 1
    largest = max(page_bytes(spec) for spec in specs.values())
    widest = max(specs.values(), key=lambda spec: page_bytes(spec) if spec.part == "attention" else 0)
    for g in groups:
        assert 1 <= len(g.layers) <= g.num_positions
        (spec,) = {specs[key] for key in g.keys}
        assert with_block_size(g.spec, spec.block_size) == spec
        factor, rest = divmod(g.spec.block_size, spec.block_size)
        assert (rest, factor == 1 or spec.part == "attention") == (0, True)
        if spec.part == "attention":
            assert page_bytes(g.spec) > largest - page_bytes(spec), "one more block would still fit"
            assert page_bytes(g.spec) < largest + page_bytes(widest), "it grew beyond need"
        assert list(g.layers) == sorted(g.layers)
        assert num_kept_blocks(g.spec, 0) == 0
    assert group_layers(dict(sorted(specs.items(), reverse=True))) == groups, "order of the mapping"
    padded = max(page_bytes(g.spec) for g in groups)
    assert all(0 <= w < groups[0].num_positions * padded for w in wasted_bytes(groups))


def at_reference(specs: Specs) -> Specs:
    """The block sizes at which groupings are compared."""
    return {
        key: with_block_size(spec, 16 if spec.part == "attention" else REFERENCE_TOKENS)
        for key, spec in specs.items()
    }


@slow_but_sure
@given(specs_of_layers)
def test_no_other_grouping_costs_less(specs: Specs):
    """But for a few percent, which fewer groups are worth; nor vLLM's."""
    specs = at_reference(specs)
    groups = group_layers(specs)
    others = [dealt(specs, positions) for positions in range(1, max(counted(specs)) + 1)]
    least = min(others, key=lambda other: (brute_cost(other), len(other)))
    limits = SLACK * brute_cost(least), SLACK * allocated_bytes(least)
    allowed = [o for o in others if brute_cost(o) <= limits[0] and allocated_bytes(o) <= limits[1]]
    assert (len(groups), brute_cost(groups)) == min((len(o), brute_cost(o)) for o in allowed)
    assert brute_cost(groups) <= SLACK * brute_cost(dealt(specs, published_positions(counted(specs))))


@st.composite
def grown_kinds(draw: st.DrawFn) -> tuple[list[KVCacheSpec], list[int], int]:
    """One or two kinds of full attention and a state of up to a dozen of their pages; groups of each;
    positions."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=2, unique=True))
    specs: list[KVCacheSpec] = [full(16, 1, 16 * size, 5 * size, query_heads=1) for size in sizes]
    state_size = draw(st.integers(1, 12 * min(sizes) * 336 // 64))
    specs.append(Mamba1Spec(REFERENCE_TOKENS, "int8", 2, 16, state_size))
    groups = draw(st.lists(st.integers(1, 40), min_size=len(specs), max_size=len(specs)))
    return specs, groups, draw(st.integers(1, 4))


@slow_but_sure
@given(grown_kinds())
def test_no_other_growth_costs_less(case: tuple[list[KVCacheSpec], list[int], int]):
    """Every factor by which each kind may grow is tried, up to some kind's first page beyond the largest.
    What is chosen costs least, and of what costs the same is the smallest page."""
    specs, num_groups, positions = case

    def cost(grown: Sequence[KVCacheSpec]) -> tuple[int, int]:
        groups = tuple(
            KVCacheGroup(0, spec, tuple(range(positions)), positions)
            for spec, number in zip(grown, num_groups, strict=True)
            for _ in range(number)
        )
        return brute_cost(groups), max(page_bytes(spec) for spec in grown)

    *growing, state = specs
    largest = max(page_bytes(spec) for spec in specs)
    ladders = [
        [with_block_size(spec, 16 * n) for n in range(1, limits(specs)[-1] // page_bytes(spec) + 1)]
        for spec in growing
    ]
    chosen = unify_pages(specs, num_groups, positions)
    assert cost(chosen) == min(cost((*rival, state)) for rival in product(*ladders))
    for spec, grown in zip(growing, chosen, strict=False):
        factor = grown.block_size // 16
        assert factor in {largest // page_bytes(spec), -(-largest // page_bytes(spec))} or len(growing) > 1


def test_few_groups_are_worth_a_few_percent():
    """3 and 29 layers: 11 groups of three pad one position in 33; 32 groups of one pad none."""
    spec = attention()
    state = Mamba1Spec(10**6, "bfloat16", 4, 8192, 14)
    specs = keyed({i: spec if i < 3 else state for i in range(32)})
    groups = group_layers(specs)
    singles = dealt(specs, 1)
    assert (len(groups), len(singles)) == (11, 32)
    assert allocated_bytes(singles) < allocated_bytes(groups) < 1.03 * allocated_bytes(singles)


def test_few_groups_are_worth_a_percent_of_what_they_cost():
    """2 and 17 layers: single layers cost 0.5 % less and hold 1.2 % less than 10 groups of two."""
    spec, state = attention(), Mamba1Spec(10**6, "bfloat16", 4, 8192, 14)
    specs = keyed({i: spec if i < 2 else state for i in range(19)})
    groups, singles = group_layers(specs), dealt(specs, 1)
    assert (len(groups), len(singles)) == (10, 19)
    assert brute_cost(singles) < brute_cost(groups) < 1.01 * brute_cost(singles)
    assert allocated_bytes(singles) < allocated_bytes(groups) < 1.02 * allocated_bytes(singles)


@slow_but_sure
@given(specs_of_layers, st.sampled_from([1, 4, 16, 24, 512]), st.sampled_from([1, 64, 10**6]))
def test_who_shares_a_group_does_not_depend_on_block_sizes(specs: Specs, block_size: int, state_size: int):
    """The two sides of a transfer may differ in both."""
    changed = {
        key: with_block_size(spec, block_size if spec.part == "attention" else state_size)
        for key, spec in specs.items()
    }
    same = group_layers(at_reference(specs))
    assert [(g.keys, g.num_positions) for g in group_layers(changed)] == [
        (g.keys, g.num_positions) for g in same
    ]


def test_wide_blocks_do_not_change_who_shares_a_group():
    """With blocks of 512 tokens, pairs would cost least; but the other side may have blocks of 16."""
    specs = model(10, 52, 1024)
    wide = {key: with_block_size(spec, 512) for key, spec in specs.items()}
    costs = [brute_cost(dealt(wide, positions)) for positions in (1, 2, 5, 10)]
    assert min(costs) == costs[1]
    assert [g.keys for g in group_layers(wide)] == [g.keys for g in group_layers(specs)]
    assert {g.num_positions for g in group_layers(wide)} == {5}


def test_waste_is_told_of_a_request_that_the_model_can_take():
    assert [waste_tokens(n) for n in (2048, 4096, 1 << 20)] == [2048, 4096, 4096]
