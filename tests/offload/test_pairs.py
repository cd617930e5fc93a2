"""Whatever engine stored a sequence's KV, any other loads it, byte for byte: every TP size, layout and block
size of both, for each kind of state, through tiers of two layouts and two block sizes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rayk.kv.geometry import layout_veto
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec
from rayk.transfer.consumer import TransferOutcome
from rayk.transfer.token_classes import common_classes
from rayk.types.errors import Unsupported
from tests.markers import one_per, slow, sweep
from tests.offload.cluster import BareNode, ByteEngine, Kind, Loaded, open_node, random_values, tokens_of
from tests.offload.families import CHUNK, FAMILIES, WINDOW
from tests.transfer.brute import brute_shard
from tests.transfer.cluster import POISON, Values

STATE_BLOCKS = {16: 64, 32: 4096}
"""Tokens of a state's block where attention's have so many: shorter than what is stored, and longer."""
KINDS = tuple(
    Kind(tp=tp, layout=layout, block_size=size, state_block_size=STATE_BLOCKS[size])
    for tp, layout, size in itertools.product((1, 2, 4), ("LBHNC", "BLHNC", "BHLNC"), (16, 32))
)
TIERS = (("BHLNC", 16), ("BHLNC", 32), ("LBNHC", 16), ("LBNHC", 32))
NUM_TOKENS = 96
ROW_GROUP = 256
"""Rows that are digested together."""
DEALT = (
    Kind(tp=4, dcp=4),
    Kind(tp=2, dcp=2, dcp_interleave=4, layout="LBHNC", block_size=32),
    Kind(tp=4, dcp=2, dcp_interleave=16, layout="BLHNC"),
    Kind(tp=2, dcp=2, stages=(1, 2)),
    Kind(tp=1, stages=(2, 1), layout="LBHNC"),
    Kind(tp=1, block_size=32),
    Kind(tp=2, layout="BLHNC"),
)
"""Engines that deal tokens, with stages, and those that do neither."""
FEW = 9
"""But for WHOLE in the first tier, `make test-all` stores from one kind in so many."""
WHOLE = ("full", "gemma3", "jamba", "deepseek_nvfp4")
"""Heads, windows, states, and quantised latents: a tier's pages know nothing of who stored them, so that all
pairs of these are enough."""


def cases() -> Iterator[object]:
    """Family and tier; how many kinds of engines are passed over for one that stores."""
    for (f, family), (t, (layout, size)) in itertools.product(enumerate(FAMILIES), enumerate(TIERS)):
        name, is_slow = f"{family}-{layout}-{size}", t > 0 or family not in WHOLE
        if is_slow:
            yield pytest.param(family, layout, size, slice((f + t) % FEW, None, FEW), id=f"{name}-few")
        yield pytest.param(family, layout, size, slice(None), id=name, marks=[slow] if is_slow else [])


def test_tiers_meet_every_kind_and_the_first_one_every_pair() -> None:
    """Nothing is left out: no layout is vetoed, and every TP size divides every family's heads."""
    assert set(WHOLE) <= set(FAMILIES)
    assert len(KINDS) == 18
    vetoed = [
        (family, str(kind))
        for family, make in FAMILIES.items()
        for kind in KINDS
        if layout_veto(group_layers(kind.shape(make).specs(0)), LAYOUTS[kind.layout])
    ]
    undivided = [
        (family, str(kind), field.name)
        for family, make in FAMILIES.items()
        for kind in KINDS
        for spec in kind.shape(make).specs(0).values()
        for field in spec.fields()
        if field.readers % kind.tp
    ]
    assert (vetoed, undivided) == ([], [])
    for tier in range(len(TIERS)):
        few = {KINDS[i] for f in range(len(FAMILIES)) for i in range(len(KINDS))[(f + tier) % FEW :: FEW]}
        assert few == set(KINDS)


def test_formats_that_heads_do_not_allow_are_two() -> None:
    """Why quantised pages are those of wider heads than other families' here."""
    refused = []
    for dtype, sizes in itertools.product(("fp8_e4m3", "fp8_e4m3_token_head", "nvfp4"), ((6, 4), (16, 16))):
        try:
            FullAttentionSpec(16, 3, *sizes, dtype, 24).fields()
        except Unsupported:
            refused.append((dtype, sizes))
    assert refused == [("fp8_e4m3_token_head", (6, 4)), ("nvfp4", (6, 4))]


def live_bytes(values: Values) -> int:
    """Of the whole model."""
    return sum(t.numel() for t in values.content.values())


def rank_bytes(node: BareNode, engine: ByteEngine, values: Values, rank: int) -> int:
    """Live bytes of the units that a rank's readers need."""
    found = 0
    for (layer, part), spec in node.make(16, 16).items():
        for f in spec.fields():
            units = brute_shard(f.units, engine.tp, rank, f.readers)
            found += len(units) * values.content[layer, part, f.name][0].numel()
    return found


def check_loaded(node: BareNode, engine: ByteEngine, values: Values, loaded: Loaded) -> None:
    """No failure, every live byte digested, right and in its place, and nothing written beside."""
    assert loaded.errors == [None] * engine.tp
    assert loaded.answer.num_tokens == values.num_tokens
    for rank, outcome in loaded.outcomes.items():
        assert outcome.num_bytes_checked == rank_bytes(node, engine, values, rank)
    engine.check_all(values, loaded.tables)


def moved(outcomes: dict[int, TransferOutcome]) -> int:
    return sum(row.bytes for outcome in outcomes.values() for row in outcome.rows)


@sweep(15)
@one_per()
@pytest.mark.parametrize(("family", "layout", "size", "chosen"), cases())
def test_what_one_engine_stored_every_other_loads(family: str, layout: str, size: int, chosen: slice) -> None:
    node = open_node(family, num_blocks=900, layout=layout, block_size=size)
    engines = [node.add(kind) for kind in KINDS]
    num_tokens = node.whole(NUM_TOKENS)
    assert num_tokens > max(WINDOW, CHUNK)
    assert num_tokens % CHUNK, "some of the last chunk is live"
    producers = list(range(len(engines)))[chosen]
    met: Counter[tuple[int, int]] = Counter()
    for i in producers:
        values = random_values(node.make, num_tokens, seed=i)
        engines[i].poison()
        answer = node.store(engines[i], values, tokens_of(i, num_tokens), seed=i)
        assert answer.ok, answer.reason
        assert (answer.num_tokens, answer.num_known_tokens) == (num_tokens, 0)
        assert answer.num_bytes >= live_bytes(values)
        for j, engine in enumerate(engines):
            loaded = node.load(engine, tokens_of(i, num_tokens), seed=i + j)
            check_loaded(node, engine, values, loaded)
            assert moved(loaded.outcomes) >= sum(
                rank_bytes(node, engine, values, r) for r in range(engine.tp)
            )
            met[i, j] += 1
        node.check_tier(values, loaded.answer)
    assert met == {(i, j): 1 for i in producers for j in range(len(engines))}
    node.expect_idle()


@one_per()
@pytest.mark.parametrize(("family", "tier"), [("deepseek", "BHLNC"), ("deepseek_nvfp4", "LBNHC")])
def test_what_one_shape_stored_every_other_loads(family: str, tier: str) -> None:
    """Pages know nothing of who dealt their tokens, or had which layers: what four ranks stored, each a
    quarter of the tokens, one rank loads."""
    classes = common_classes(kind.engine for kind in DEALT)
    node = open_node(family, num_blocks=900, layout=tier, token_classes=classes)
    engines = [node.add(kind) for kind in DEALT]
    num_tokens = node.whole(NUM_TOKENS)
    for i, producer in enumerate(engines):
        values = random_values(node.make, num_tokens, seed=i)
        producer.poison()
        answer = node.store(producer, values, tokens_of(i, num_tokens), seed=i)
        assert answer.ok, answer.reason
        for j, engine in enumerate(engines):
            loaded = node.load(engine, tokens_of(i, num_tokens), seed=i + j)
            assert loaded.errors == [None] * engine.tp
            assert loaded.answer.num_tokens == num_tokens
            engine.check_all(values, loaded.tables)
        node.check_tier(values, loaded.answer)
    node.expect_idle()


@sweep(3)
@one_per()
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_by_name_has_any_length(family: str) -> None:
    """As a request that was preempted: its last blocks are not full, and come back all the same."""
    node = open_node(family, num_blocks=200)
    engines = [node.add(kind) for kind in KINDS]
    for j, engine in enumerate(engines):
        producer = engines[(5 * j + 1) % len(engines)]
        num_tokens = 61 + 2 * j
        values = random_values(node.make, num_tokens, seed=j)
        producer.poison()
        tokens = tokens_of(j, num_tokens)
        answer = node.store(producer, values, tokens, seed=j, keep_as=f"kept{j}")
        assert answer.ok, answer.reason
        assert node.tier.status()["num_kept"] == 1
        loaded = node.load(engine, kept_as=f"kept{j}", seed=j)
        assert loaded.errors == [None] * engine.tp
        assert loaded.answer.num_tokens == num_tokens
        engine.check(values, loaded.tables)
        assert node.ask(engine, kept_as=f"kept{j}").ticket is None, "it is loaded once"
    node.expect_idle()


@one_per()
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_stored_twice(family: str) -> None:
    """Another engine that computed the same moves nothing. Layers that share pages have none of their own."""
    node = open_node(family, num_blocks=200)
    first, other = node.add(KINDS[3]), node.add(KINDS[-1])
    num_tokens = node.whole(NUM_TOKENS)
    values = random_values(node.make, num_tokens)
    answer = node.store(first, values, tokens_of(0, num_tokens))
    largest = max(g.spec.block_size for g in (*node.tier.manager.groups, *first.groups()))
    whole = 0
    for (layer, part), spec in node.make(16, 16).items():
        live = len(values.content[layer, part, spec.fields()[0].name][0])
        # Rows in one block with a live one may move, too.
        rows = min(num_tokens, live + 2 * largest) if part == "attention" else 1
        whole += sum(f.units * f.row_bytes for f in spec.fields()) * rows
    assert live_bytes(values) <= answer.num_bytes <= whole
    num_used = node.tier.status()["num_cached_blocks"]
    again = node.store(other, values, tokens_of(0, num_tokens))
    assert again.ok
    assert (again.num_known_tokens, again.num_bytes) == (num_tokens, 0)
    assert again.transfers == ()
    assert node.tier.status()["num_cached_blocks"] == num_used
    node.expect_idle()


@one_per()
@pytest.mark.parametrize("family", ["full", "deepseek", "fp8", "nvfp4"])
def test_of_a_longer_sequence_only_what_lies_behind_is_moved(family: str) -> None:
    """From the last row group on of what is there: it is digested as a whole."""
    node = open_node(family, num_blocks=200)
    first, other = (node.add(replace(kind, num_blocks=60)) for kind in (KINDS[3], KINDS[-1]))
    for num_tokens, num_known in ((ROW_GROUP, 0), (ROW_GROUP + 48, ROW_GROUP), (3 * ROW_GROUP, ROW_GROUP)):
        values = random_values(node.make, num_tokens)
        answer = node.store(other, values, tokens_of(0, num_tokens))
        assert answer.num_known_tokens == num_known
        assert answer.num_bytes == live_bytes(values) * (num_tokens - num_known) // num_tokens
        loaded = node.load(first, tokens_of(0, num_tokens))
        assert loaded.errors == [None] * first.tp
    assert node.tier.status()["num_cached_blocks"] == 3 * ROW_GROUP // 16, "no block is there twice"
    node.expect_idle()


def test_the_check_sees_one_wrong_byte() -> None:
    """A tier that gives back a byte that was not stored."""
    node = open_node("full")
    engine = node.add(KINDS[0])
    values = random_values(node.make, NUM_TOKENS)
    engine.poison()
    node.store(engine, values, tokens_of(0, NUM_TOKENS))
    loaded = node.load(engine, tokens_of(0, NUM_TOKENS))
    engine.check_all(values, loaded.tables)
    wrong = values.content[1, "attention", "k"]
    wrong[2, 7, 3] ^= 1
    with pytest.raises(AssertionError, match="1 of"):
        engine.check_all(values, loaded.tables)
    wrong[2, 7, 3] ^= 1
    engine.check_all(values, loaded.tables)
    free = next(b for b in range(1, 40) if b not in loaded.tables[0])
    view = engine.views(0, engine.groups()[0], 0)[0].view
    assert torch.equal(view[free], torch.full_like(view[free], POISON))
    view[free, 0, 0, 0] ^= 1
    with pytest.raises(AssertionError, match="1 of"):
        engine.check_all(values, loaded.tables)
