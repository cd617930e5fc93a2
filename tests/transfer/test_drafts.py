"""Draft layers that ride: moved where both engines have them, left out by name where one lacks them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, MlaSpec, with_dtype
from rayk.transfer.drafts import left_out
from rayk.transfer.handshake import check_engine
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.plan import consecutive_tables, num_turns, plan_transfer, release_senders
from rayk.types.errors import HandshakeMismatch, KVMismatch
from tests.each import each
from tests.transfer.cluster import POISON, Pair, Shape, Values, make_engine
from tests.transfer.families import Specs

HEAD = FullAttentionSpec(4, 4, 6, 2, "float32", 8)
LATENT = MlaSpec(4, 6, 2, "bfloat16", 8)


def draft(*specs: KVCacheSpec, first: int = 3) -> Specs:
    """A drafter's layers, behind the 3 of the model."""
    return {(first + i, "attention"): spec for i, spec in enumerate(specs)}


HEADS = draft(HEAD)
MIXED = draft(LATENT, HEAD, LATENT)


def pair_of(shape: Shape) -> Pair:
    network = LocalNetwork()
    pair = Pair(*(make_engine(shape, side, lambda name: LocalAgent(name, network)) for side in (0, 1)))
    pair.connect()
    return pair


def of_model(values: Values) -> Values:
    """Without the draft layers."""
    return Values(values.num_tokens, {key: v for key, v in values.content.items() if key[0] < 3})


TPS = [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)]
SHARED = [
    Shape(
        tp=tp,
        draft_tp=draft_tp,
        layouts=layouts,
        block_sizes=blocks,
        window=window,
        drafts=(specs, specs),
    )
    for tp, (layouts, blocks, window, specs) in itertools.product(
        TPS,
        [
            (("BHLNC", "BHLNC"), (4, 4), None, HEADS),
            (("LBNHC", "BLHNC"), (8, 4), 5, MIXED),
            (("LHBNC", "BHLNC"), (4, 8), None, MIXED),
            (("BLNHC", "LBHNC"), (4, 4), 6, HEADS),
        ],
    )
    for draft_tp in itertools.product(*([n for n in (1, 2, 4) if size % n == 0] for size in tp))
]


@each("shape", SHARED)
def test_what_both_sides_draft_with_moves(shape: Shape):
    """Whatever TP of model and drafter, layouts and blocks: each byte of each rank, and no other."""
    pair = pair_of(shape)
    for num_tokens in (9, 17):
        values = shape.values(num_tokens)
        for engine in (pair.producer, pair.consumer):
            for caches in engine.caches:
                caches.buffer[: caches.geometry.pages_bytes] = POISON
        outcomes, tables = pair.transfer(values, f"r{num_tokens}")
        assert [o.error for o in outcomes.values()] == [None] * shape.tp[1]
        assert {o.left_out for o in outcomes.values()} == {()}
        pair.consumer.check_all(values, tables)
        own = len(pair.consumer.groups()) - len(set(shape.drafts[1].values()))
        moved = {row.group for o in outcomes.values() for row in o.rows}
        assert moved >= set(range(own, len(pair.consumer.groups())))
        assert {row.left_out for o in outcomes.values() for row in o.rows} == {""}
    assert all(pair.released()), "replicas that nobody reads are told, too"


LEFT = [
    (replace(Shape(), drafts=(HEADS, {})), ("draft layer 0: the consumer has none",)),
    (replace(Shape(), drafts=({}, HEADS)), ("draft layer 0: the producer has none",)),
    (
        replace(Shape(), drafts=(MIXED, HEADS), drafters=("a", "a")),
        (
            "draft layer 0: kind is mla at the producer, full at the consumer",
            "draft layer 1: the consumer has none",
            "draft layer 2: the consumer has none",
        ),
    ),
    (
        replace(Shape(), drafts=(draft(HEAD, HEAD), HEADS)),
        ("draft layer 0: it goes with draft layer 1", "draft layer 1: the consumer has none"),
    ),
    (
        replace(Shape(), drafts=(HEADS, HEADS), drafters=("a", "b")),
        ("draft layer 0: its drafter is a at the producer, b at the consumer",),
    ),
]


@each(
    ("case", "tp", "layouts"),
    itertools.product(LEFT, [(1, 1), (2, 4), (4, 2)], [("BHLNC",) * 2, ("LHBNC", "LBNHC")]),
)
def test_what_one_side_lacks_is_left_out_by_name(case, tp, layouts):  # noqa: ANN001
    """The model's KV moves and is proven as without drafters; no byte of a draft layer does."""
    shape, names = replace(case[0], tp=tp, layouts=layouts), case[1]
    pair = pair_of(shape)
    values = shape.values(17)
    tables = pair.producer.tables(17)
    pair.producer.write(values, tables)
    ticket = pair.producer.ticket(17, tables)
    there = pair.consumer.tables(17)
    pair.start(ticket, there)
    outcomes = pair.finish(ticket)
    assert [o.error for o in outcomes.values()] == [None] * tp[1]
    assert {o.left_out for o in outcomes.values()} == {names}
    rows = [row for o in outcomes.values() for row in o.rows]
    assert {row.left_out for row in rows} == {"; ".join(names)}
    pair.consumer.check_all(of_model(values), there)
    plain = pair_of(replace(shape, drafts=({}, {}), draft_tp=(1, 1)))
    alone, _ = plain.transfer(of_model(values))
    assert sum(row.bytes for row in rows) == sum(row.bytes for o in alone.values() for row in o.rows)
    assert sum(o.num_bytes_checked for o in outcomes.values()) == sum(
        o.num_bytes_checked for o in alone.values()
    )


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True)], ids=str)
def test_formats_are_converted_with_drafts_and_without(tp: tuple[int, int], has: tuple[bool, bool]):
    """D keeps both in another format: both are converted, or the model's KV alone."""
    specs = draft(HEAD), draft(with_dtype(HEAD, "bfloat16"))
    shape = Shape(
        tp=tp, drafts=tuple(s if h else {} for s, h in zip(specs, has, strict=True)), dtype="float32"
    )
    narrow = replace(shape, dtype="bfloat16")
    network = LocalNetwork()
    pair = Pair(
        make_engine(shape, 0, lambda name: LocalAgent(name, network)),
        make_engine(narrow, 1, lambda name: LocalAgent(name, network)),
    )
    pair.connect()
    values = Values(17, {k: v for k, v in shape.values(17).content.items() if k[0] < 3 or has[0]})
    outcomes, tables = pair.transfer(values)
    assert [o.error for o in outcomes.values()] == [None] * tp[1]
    assert all(bool(o.left_out) == (not all(has)) for o in outcomes.values())
    rounded = {k: v.to(torch.bfloat16) for k, v in values.content.items() if k[0] < 3 or all(has)}
    pair.consumer.check(Values(17, rounded), tables)


@pytest.mark.parametrize("layer", [3, 4, 5])
def test_a_wrong_byte_of_a_draft_layer_is_named(layer: int):
    """The producer's byte changes after it was digested."""
    shape = Shape(tp=(2, 1), draft_tp=(2, 1), drafts=(MIXED, MIXED))
    pair = pair_of(shape)
    values, tables = shape.values(17), pair.producer.tables(17)
    pair.producer.write(values, tables)
    ticket = pair.producer.ticket(17, tables)
    group = _group(pair, layer)
    for rank in range(2):
        blocks, rows = pair.producer.places(group, tables[group.index], 17, rank)
        field = pair.producer.views(rank, group, layer)[0]
        field.view.view(torch.uint8)[blocks[10], 0, rows[10], 0] ^= 1
    there = pair.consumer.tables(17)
    pair.start(ticket, there)
    error = pair.finish(ticket)[0].error
    assert isinstance(error, KVMismatch)
    assert (error.layer, error.draft_layer) == (layer, layer - 3)
    assert f"differs: draft layer {layer - 3}, group {_group(pair, layer).index}, " in str(error)
    fetched = {
        rank: r.fetch_rows(layer, error.group, tables[error.group], 17)
        for rank, r in enumerate(pair.producer.ranks)
    }
    for rank in fetched:  # what was digested
        fetched[rank] = {k: v.copy() for k, v in fetched[rank].items()}
        for (_, _), content in fetched[rank].items():
            content[10, 0] ^= 1
    found = pair.consumer.ranks[0].diagnose("r", layer, error.group, fetched)
    assert isinstance(found, KVMismatch)
    assert (found.draft_layer, found.token) == (layer - 3, 10)


def _group(pair: Pair, layer: int):  # noqa: ANN202 - a KVCacheGroup
    return next(g for g in pair.producer.groups() if layer in g.layers)


def test_plans_without_drafters_are_what_they_were():
    """Reads of the model are the same whether or not drafters ride."""
    for tp, layouts in itertools.product([(1, 2), (4, 2)], [("BHLNC", "LHBNC")]):
        plain = pair_of(Shape(tp=tp, layouts=layouts))
        ridden = pair_of(Shape(tp=tp, layouts=layouts, drafts=(MIXED, MIXED)))
        for rank in range(tp[1]):
            own, more = (p.consumer.ranks[rank].plan("p").reads for p in (plain, ridden))
            assert [r for r in more if r.group < len(plain.consumer.groups())] == list(own)


def test_each_replica_of_a_drafter_is_read_in_turn():
    """A latent of the drafter is on all 4 ranks of P: 2 readers of D take others in each turn."""
    pair = pair_of(Shape(tp=(4, 2), drafts=(draft(LATENT), draft(LATENT)), units=4))
    producers = [c.geometry for c in pair.producer.caches]
    consumers = [c.geometry for c in pair.consumer.caches]
    assert num_turns(producers) == 4
    read = set()
    for turn in range(4):
        for consumer in consumers:
            reads = plan_transfer(producers, consumer, turn).reads
            read |= {r.producer_rank for r in reads if r.layers == (3,)}
        assert all(release_senders(producers, consumers, turn))
    assert read == {0, 1, 2, 3}


def test_tables_of_riders_are_their_carriers():
    pair = pair_of(Shape(drafts=(MIXED, MIXED), window=5))
    groups = pair.producer.groups()
    tables = consecutive_tables(pair.producer.caches[0].geometry, 17)
    for g in groups:
        assert tables[g.index] == tables[g.index if g.rides is None else g.rides]


def test_what_is_impossible_of_riders_is_refused_before_the_first_byte():
    pair = pair_of(Shape(tp=(2, 2), drafts=(MIXED, MIXED), draft_tp=(1, 2)))
    (first, second) = pair.producer.descriptions
    geometry = first.geometry
    regions, groups = geometry.regions, geometry.groups
    swapped = (*regions[:-1], replace(regions[-1], offset=regions[0].offset))
    rider = groups[-1]
    homeless = replace(rider, group=replace(rider.group, rides=len(groups) - 2))
    nowhere = replace(rider, group=replace(rider.group, rides=99))
    for changed, text in (
        (replace(geometry, regions=swapped), "regions"),
        (replace(geometry, regions=()), "regions"),
        (replace(geometry, groups=(*groups[:-1], homeless)), "regions"),
        (replace(geometry, groups=(*groups[:-1], nowhere)), "regions"),
        (replace(geometry, shape=replace(geometry.shape, draft_tp=2)), "units of"),
    ):
        with pytest.raises(HandshakeMismatch, match=text):
            check_engine([replace(first, geometry=changed), second])
    with pytest.raises(AssertionError):
        replace(geometry.shape, draft_tp=3)


def test_left_out_is_empty_without_drafters():
    pair = pair_of(Shape())
    assert left_out(pair.producer.caches[0].geometry, pair.consumer.caches[0].geometry) == {}
