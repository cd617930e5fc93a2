"""The plan against rank buffers filled by definition (brute.py)."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, Mamba1Spec, MlaSpec, SlidingWindowSpec
from rayk.parallel.shard import EngineShape
from rayk.transfer.plan import (
    BlockReads,
    TransferPlan,
    consecutive_tables,
    num_turns,
    plan_pushes,
    plan_transfer,
    release_senders,
)
from rayk.transfer.token_classes import ONE_CLASS
from rayk.types.errors import TransferError
from tests.each import each
from tests.markers import thorough
from tests.transfer.brute import UNKNOWN, BruteRank, brute_shard, coordinates

NAMES = tuple(LAYOUTS)


def make_ranks(
    specs: dict[int, KVCacheSpec], layout: str, tp_size: int, num_blocks: int, kernel_block_size: int | None
) -> list[RankGeometry]:
    groups = group_layers({(layer, spec.part): spec for layer, spec in specs.items()})
    return [
        plan_rank(
            groups,
            LAYOUTS[layout],
            shape=EngineShape(tp_size),
            rank=rank,
            num_blocks=num_blocks,
            kernel_block_sizes=kernel_block_sizes(groups, kernel_block_size, {}),
        )
        for rank in range(tp_size)
    ]


def brute(rank: RankGeometry, group: KVCacheGroup, kernel_block_size: int | None) -> BruteRank:
    spec = group.spec
    assert isinstance(spec, FullAttentionSpec)
    return BruteRank(
        layout=rank.layout.name,
        num_positions=group.num_positions,
        num_layers=len(group.layers),
        units=brute_shard(spec.num_kv_heads, rank.tp_size, rank.tp_rank, spec.num_query_heads),
        block_size=spec.block_size,
        kernel_block_size=kernel_block_size or spec.block_size,
        content=spec.head_size_k + spec.head_size_v,
        num_blocks=rank.num_blocks,
    )


def byte_indices(reads: BlockReads) -> tuple[np.ndarray, np.ndarray]:
    """Source and destination address of every byte the reads copy."""
    p, runs = reads.pattern, reads.pattern.runs
    within = np.arange(runs.num_bytes) - np.repeat(np.cumsum(runs.lengths) - runs.lengths, runs.lengths)
    source = np.repeat(runs.source, runs.lengths) + within
    destination = np.repeat(runs.destination, runs.lengths) + within
    return (
        (reads.source_blocks[:, None] * np.repeat(p.source_strides, runs.lengths) + source).reshape(-1),
        (
            reads.destination_blocks[:, None] * np.repeat(p.destination_strides, runs.lengths) + destination
        ).reshape(-1),
    )


def apply(plan: TransferPlan, reads: list[BlockReads], buffers: list[np.ndarray]) -> np.ndarray:
    """The consumer's buffer after the reads; AssertionError if a byte is written twice."""
    landed = np.full(plan.consumer.pages_bytes, UNKNOWN, dtype=np.int64)
    writes = np.zeros(plan.consumer.pages_bytes, dtype=np.int8)
    for read in reads:
        source, destination = byte_indices(read)
        landed[destination] = buffers[read.producer_rank][source]
        np.add.at(writes, destination, 1)
    assert writes.max(initial=0) <= 1, "a destination byte is written twice"
    return landed


def check_pair(
    num_units: int, producer_tp: int, consumer_tp: int, producer_layout: str, consumer_layout: str
):
    """One group, equal blocks, scattered block ids: the consumer gets exactly its bytes."""
    readers = lcm(num_units, producer_tp, consumer_tp)
    spec = FullAttentionSpec(2, num_units, 2, 1, "int8", readers)
    specs: dict[int, KVCacheSpec] = {0: spec, 1: spec}
    producers = make_ranks(specs, producer_layout, producer_tp, 4, None)
    consumers = make_ranks(specs, consumer_layout, consumer_tp, 5, None)
    group = producers[0].groups[0].group
    values = coordinates(2, num_units, 4, 3)
    source_table, destination_table = [3, 1], [2, 4]
    buffers = [brute(p, group, None).buffer(values, source_table, range(4)) for p in producers]
    for consumer in consumers:
        plan = plan_transfer(producers, consumer)
        landed = apply(plan, plan.lower(4, [source_table], [destination_table]), buffers)
        expected = brute(consumer, group, None).buffer(values, destination_table, range(4))
        np.testing.assert_array_equal(landed, expected)


def fits(num_units: int, tp_size: int) -> bool:
    return num_units % tp_size == 0 or tp_size % num_units == 0


TRIPLES = [
    (units, producer_tp, consumer_tp)
    for units, producer_tp, consumer_tp in itertools.product(range(1, 17), repeat=3)
    if fits(units, producer_tp) and fits(units, consumer_tp)
]


def test_the_sweep_covers_what_it_says():
    assert len(TRIPLES) == 610
    assert (6, 3, 2) in TRIPLES
    assert (12, 4, 6) in TRIPLES
    assert (1, 16, 16) in TRIPLES


@thorough
@each("triple", TRIPLES, ids=lambda t: f"{t[0]}units-{t[1]}to{t[2]}")
def test_every_triple_at_some_layout_pairs(triple: tuple[int, int, int]):
    """Every (units, P TP, D TP); the 36 layout pairs are dealt over neighbouring triples."""
    pairs = list(itertools.product(NAMES, repeat=2))
    start = TRIPLES.index(triple) * 2
    for producer_layout, consumer_layout in (pairs[start % 36], pairs[(start + 1) % 36]):
        check_pair(*triple, producer_layout, consumer_layout)


@pytest.mark.parametrize(
    "triple", [(1, 4, 2), (2, 1, 4), (4, 4, 1), (6, 3, 2), (12, 4, 6), (3, 6, 3)], ids=str
)
def test_all_layout_pairs(triple: tuple[int, int, int]):
    for producer_layout, consumer_layout in itertools.product(NAMES, repeat=2):
        check_pair(*triple, producer_layout, consumer_layout)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_triple_at_all_layout_pairs():
    for triple in TRIPLES:
        for producer_layout, consumer_layout in itertools.product(NAMES, repeat=2):
            check_pair(*triple, producer_layout, consumer_layout)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """Unlike block sizes, kernel blocks, windows, several groups, uneven overlaps (6 readers of 2 units)."""
    units, readers, producer_tp, consumer_tp = draw(
        st.sampled_from([(2, 6, 3, 2), (2, 6, 2, 3), (2, 8, 4, 2), (4, 8, 1, 4), (4, 4, 4, 2), (6, 12, 4, 6)])
    )
    return {
        "units": units,
        "readers": readers,
        "tp": (producer_tp, consumer_tp),
        "blocks": draw(st.sampled_from([(8, 8), (8, 16), (16, 8), (16, 24), (24, 16), (3, 2)])),
        "kernel": draw(st.sampled_from([(None, None), ("half", None), (None, "half"), ("half", "half")])),
        "layouts": (draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMES))),
        "window": draw(st.sampled_from([None, 1, 7, 20, 50])),
        "num_layers": draw(st.integers(1, 5)),
        "num_tokens": draw(st.integers(1, 75)),
        "seed": draw(st.integers(0, 1000)),
    }


def build_side(case: dict, side: int) -> tuple[list[RankGeometry], list[list[int]], int | None]:
    block_size = case["blocks"][side]
    full = FullAttentionSpec(block_size, case["units"], 2, 1, "int8", case["readers"])
    specs: dict[int, KVCacheSpec] = {}
    for layer in range(case["num_layers"]):
        sliding = case["window"] is not None and layer % 3 != 0
        specs[layer] = (
            SlidingWindowSpec(block_size, case["units"], 2, 1, "int8", case["readers"], case["window"])
            if sliding
            else full
        )
    kernel = block_size // 2 if case["kernel"][side] == "half" and block_size % 2 == 0 else None
    ranks = make_ranks(specs, case["layouts"][side], case["tp"][side], 150, kernel)
    rng = np.random.default_rng(case["seed"] + side)
    ids = rng.permutation(np.arange(1, 150))
    tables = [
        [0 if b == 0 else int(ids[b]) for b in t] for t in consecutive_tables(ranks[0], case["num_tokens"])
    ]
    return ranks, tables, kernel


@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=cases())
def test_live_rows_arrive_for_any_blocks_groups_and_windows(case: dict):
    """All groups share one pool. Every live row arrives, from the right place; nothing is written twice."""
    producers, source_tables, source_kernel = build_side(case, 0)
    consumers, destination_tables, destination_kernel = build_side(case, 1)
    tokens = case["num_tokens"]
    for consumer in consumers:
        plan = plan_transfer(producers, consumer)
        reads = plan.lower(tokens, source_tables, destination_tables)
        for index, geometry in enumerate(consumer.groups):
            group = geometry.group
            live = group.spec.live_rows(tokens)
            values = coordinates(len(group.layers), case["units"], tokens, 3)
            buffers = [
                brute(p, p.groups[index].group, source_kernel).buffer(values, source_tables[index], live)
                for p in producers
            ]
            landed = apply(plan, [r for r in reads if r.group == index], buffers)
            shape = brute(consumer, group, destination_kernel)
            expected = shape.buffer(values, destination_tables[index], live)
            # Rows around the live ones may be written (whole segments move), with rows of the same blocks.
            np.testing.assert_array_equal(landed[expected != UNKNOWN], expected[expected != UNKNOWN])
            assert set(landed[expected == UNKNOWN].tolist()) <= {UNKNOWN}
        # No read of one group may touch a byte another group's read wrote.
        apply(plan, reads, [np.zeros(p.pages_bytes, dtype=np.int64) for p in producers])


def test_every_triple_with_a_dividing_ratio_has_a_head_map():
    """Of (KV heads, producer TP, consumer TP) in 1 to 16: 376. In 86 more producer ranks than heads and than
    consumer ranks hold them, which vLLM 0.33.0 refuses.

    163 and 38 of those are of the sizes {1, 2, 3, 4, 6, 8, 16}.
    """
    chosen = [
        (k, p, d)
        for k, p, d in itertools.product(range(1, 17), repeat=3)
        if fits(k, p) and fits(k, d) and (p % d == 0 or d % p == 0)
    ]
    assert len(chosen) == 376
    assert sum(p > d and p > k for k, p, d in chosen) == 86
    of_seven_sizes = [triple for triple in chosen if set(triple) <= {1, 2, 3, 4, 6, 8, 16}]
    assert len(of_seven_sizes) == 163
    assert sum(p > d and p > k for k, p, d in of_seven_sizes) == 38
    for k, p, d in chosen:
        spec = FullAttentionSpec(2, k, 1, 1, "int8", lcm(k, p, d))
        producers, consumers = (
            make_ranks({0: spec}, "BHLNC", p, 2, None),
            make_ranks({0: spec}, "BHLNC", d, 2, None),
        )
        for consumer in consumers:
            plan = plan_transfer(producers, consumer)
            read_units = sorted(u for r in plan.reads for u in r.units["k"])
            assert read_units == brute_shard(k, d, consumer.tp_rank, lcm(k, p, d))
            for read in plan.reads:
                assert read.units["k"] == read.units["v"]
                assert set(read.units["k"]) <= set(brute_shard(k, p, read.producer_rank, lcm(k, p, d)))


@pytest.mark.parametrize("triple", [(2, 4, 1), (1, 8, 2), (1, 16, 16), (4, 2, 4), (2, 4, 2)], ids=str)
def test_every_producer_rank_is_told_when_to_free(triple: tuple[int, int, int]):
    k, p, d = triple
    spec = FullAttentionSpec(2, k, 1, 1, "int8", lcm(k, p, d))
    producers, consumers = (
        make_ranks({0: spec}, "BHLNC", p, 2, None),
        make_ranks({0: spec}, "BHLNC", d, 2, None),
    )
    senders = release_senders(producers, consumers)
    assert len(senders) == p
    for rank, ranks in enumerate(senders):
        assert ranks, f"producer rank {rank} is never told"
        assert len(set(ranks)) == len(ranks)
        readers = [c.tp_rank for c in consumers if rank in plan_transfer(producers, c).producer_ranks]
        assert set(readers) <= set(ranks)


def test_readers_are_spread_over_replicas():
    """One unit on 4 producer ranks, 4 consumer ranks: each reads from its own."""
    spec = FullAttentionSpec(2, 1, 1, 1, "int8", 4)
    producers, consumers = (
        make_ranks({0: spec}, "BHLNC", 4, 2, None),
        make_ranks({0: spec}, "BHLNC", 4, 2, None),
    )
    assert [plan_transfer(producers, c).producer_ranks for c in consumers] == [(0,), (1,), (2,), (3,)]


MLA = MlaSpec(2, 3, 2, "int8", 4)
"""Latents that every rank keeps whole."""
TURNS = [
    ({0: MLA}, 2, 1, 2),
    ({0: MLA}, 4, 1, 4),
    ({0: MLA}, 4, 2, 4),
    ({0: MLA}, 2, 4, 2),
    ({0: FullAttentionSpec(2, 2, 1, 1, "int8", 8)}, 8, 1, 4),
    ({0: FullAttentionSpec(2, 2, 1, 1, "int8", 8)}, 4, 4, 2),
    ({0: FullAttentionSpec(2, 4, 1, 1, "int8", 8)}, 4, 2, 1),
]
"""Specs, TP of both sides, replicas of every unit."""


@pytest.mark.parametrize(("specs", "p", "d", "replicas"), TURNS)
def test_replicas_take_turns(specs: dict[int, KVCacheSpec], p: int, d: int, replicas: int):
    """Over the turns each consumer rank reads every replica of every unit it holds once; after them they
    come again. Each turn is a whole plan: its pushes are its reads, and every producer rank is told."""
    producers, consumers = make_ranks(specs, "BHLNC", p, 3, None), make_ranks(specs, "LBHNC", d, 3, None)
    assert num_turns(producers) == replicas
    for consumer in consumers:
        sources = [
            plan_transfer(producers, consumer, turn).sources(ONE_CLASS) for turn in range(2 * replicas)
        ]
        for field in consumer.groups[0].fields:
            for unit in field.units:
                holders = [r.tp_rank for r in producers if unit in r.groups[0].field(field.field.name).units]
                elected = [s[0, field.field.name, unit, 0] for s in sources]
                assert sorted(elected[:replicas]) == holders
                assert elected[replicas:] == elected[:replicas]
    for turn in range(replicas):
        plans = [plan_transfer(producers, c, turn) for c in consumers]
        for producer in producers:
            pushes = plan_pushes(producer, producers, consumers, turn)
            assert {
                rank: [r.units for r in plan.reads if r.producer_rank == producer.tp_rank]
                for rank, plan in enumerate(plans)
                if producer.tp_rank in plan.producer_ranks
            } == {rank: [r.units for r in plan.reads] for rank, plan in pushes.items()}
        for rank, senders in enumerate(release_senders(producers, consumers, turn)):
            readers = tuple(
                c.tp_rank for c, plan in zip(consumers, plans, strict=True) if rank in plan.producer_ranks
            )
            assert senders == readers or (not readers and len(senders) == 1)


def test_every_turn_reads_the_same_bytes():
    """Two heads on eight ranks, four replicas of each, whose buffers are filled by definition."""
    spec = FullAttentionSpec(2, 2, 2, 1, "int8", 8)
    producers = make_ranks({0: spec, 1: spec}, "LBHNC", 8, 4, None)
    (consumer,) = make_ranks({0: spec, 1: spec}, "BHLNC", 1, 5, None)
    group = producers[0].groups[0].group
    values = coordinates(2, 2, 4, 3)
    buffers = [brute(p, group, None).buffer(values, [3, 1], range(4)) for p in producers]
    expected = brute(consumer, group, None).buffer(values, [2, 4], range(4))
    read = []
    for turn in range(num_turns(producers)):
        plan = plan_transfer(producers, consumer, turn)
        np.testing.assert_array_equal(apply(plan, plan.lower(4, [[3, 1]], [[2, 4]]), buffers), expected)
        read += plan.producer_ranks
    assert sorted(read) == list(range(8))


def test_descriptor_indices_of_the_fixture():
    """Regions of 100 blocks: index = region * num_blocks + block."""
    spec = FullAttentionSpec(2, 1, 1, 1, "int8", 1)
    specs: dict[int, KVCacheSpec] = {0: spec, 1: spec}
    (producer,) = make_ranks(specs, "LBHNC", 1, 100, None)
    (consumer,) = make_ranks(specs, "LBHNC", 1, 50, None)
    (reads,) = plan_transfer([producer], consumer).lower(4, [[3, 5]], [[7, 8]])
    source, destination = reads.indices(100, 50)
    assert source.tolist() == [3, 5, 103, 105]
    assert destination.tolist() == [7, 8, 57, 58]
    assert source.dtype == np.int32
    assert (reads.num_bytes, reads.num_descriptors) == (2 * 2 * 4, 4)


def test_descriptor_indices_of_attention_and_states_together():
    """Two regions of attention, four of states (taps and states of two layers), 100 blocks each: attention's
    blocks 3 and 5, and the blocks 1 and 2 of the states of two requests.

    Each group has lists of its own: in one list, the states' would follow attention's.
    """
    attention = FullAttentionSpec(2, 1, 1, 1, "int8", 2)
    groups = group_layers(
        {(layer, s.part): s for layer in range(2) for s in (attention, Mamba1Spec(4096, "float32", 4, 32, 2))}
    )
    (producer,), consumers = (
        [
            plan_rank(groups, LAYOUTS["LBHNC"], shape=EngineShape(tp), rank=rank, num_blocks=100)
            for rank in range(tp)
        ]
        for tp in (1, 2)
    )
    by_kind = {"full": [3, 5], "mamba1": [1]}
    tables = [by_kind[g.spec.kind] for g in groups]
    block_size = next(g.spec.block_size for g in groups if g.spec.kind == "full")
    reads = {
        groups[r.group].spec.kind: r
        for r in plan_transfer([producer], consumers[0]).lower(2 * block_size, tables, tables)
    }
    states = replace(reads["mamba1"], source_blocks=np.array([1, 2]), destination_blocks=np.array([1, 2]))
    found = [r.indices(100, 100)[0].tolist() for r in (reads["full"], states)]
    assert found[0] == [3, 5, 103, 105]
    start = 100 * len(reads["full"].pattern.runs)
    assert [start + i for i in found[1]] == [201, 202, 301, 302, 401, 402, 501, 502]


def test_small_blocks_against_large_ones():
    """Blocks of 4 tokens, ids 1 to 10, into blocks of 16, ids 1 to 3: quarters 4 to 15, 10 are needed.

    The last two are neither written nor zeroed: no kernel reads a row behind the last token (seq_lens), and
    digests cover live rows only, so what an earlier request left there reaches nobody.
    """
    specs = [FullAttentionSpec(size, 1, 1, 1, "int8", 1) for size in (4, 16)]
    (producer,), (consumer,) = (make_ranks({0: spec}, "BHLNC", 1, 20, None) for spec in specs)
    plan = plan_transfer([producer], consumer)
    reads = plan.lower(40, [list(range(1, 11))], [[1, 2, 3]])
    quarters = {
        source: destination * 4 + r.pattern.destination_row // 4
        for r in reads
        for source, destination in zip(r.source_blocks.tolist(), r.destination_blocks.tolist(), strict=True)
    }
    assert quarters == dict(zip(range(1, 11), range(4, 14), strict=True))
    landed = apply(plan, reads, [np.arange(producer.pages_bytes)])
    assert (landed.reshape(-1, 4 * 2)[:, 0] != UNKNOWN).nonzero()[0].tolist() == list(range(4, 14))
    assert consumer.groups[0].group.spec.live_rows(40) == range(40)


def test_consecutive_dense_blocks_coalesce():
    spec = FullAttentionSpec(2, 1, 1, 1, "int8", 1)
    (producer,), (consumer,) = (
        make_ranks({0: spec}, "BHLNC", 1, 20, None),
        make_ranks({0: spec}, "BHLNC", 1, 20, None),
    )
    (reads,) = plan_transfer([producer], consumer).lower(10, [[3, 4, 5, 9, 10]], [[1, 2, 3, 4, 5]])
    assert (reads.num_descriptors, reads.num_coalesced) == (5, 2)


def test_one_block_is_one_run_only_where_the_layout_says_so():
    """BHLNC keeps a head slice one run across layers; BLNHC cuts it by layer and token."""
    spec = FullAttentionSpec(4, 4, 2, 2, "int8", 4)
    specs: dict[int, KVCacheSpec] = dict.fromkeys(range(3), spec)
    runs = {}
    for layout in ("BHLNC", "BLHNC", "BLNHC"):
        producers, consumers = make_ranks(specs, layout, 1, 4, None), make_ranks(specs, layout, 2, 4, None)
        plan = plan_transfer(producers, consumers[1])
        (reads,) = plan.lower(4, [[1]], [[1]])
        runs[layout] = reads.num_descriptors
    assert runs == {"BHLNC": 1, "BLHNC": 3, "BLNHC": 12}


def test_a_null_block_is_never_read():
    spec = FullAttentionSpec(2, 1, 1, 1, "int8", 1)
    (producer,), (consumer,) = (
        make_ranks({0: spec}, "BHLNC", 1, 4, None),
        make_ranks({0: spec}, "BHLNC", 1, 4, None),
    )
    with pytest.raises(TransferError, match="null block of the producer"):
        plan_transfer([producer], consumer).lower(2, [[0]], [[1]])
    with pytest.raises(TransferError, match="null block of the consumer"):
        plan_transfer([producer], consumer).lower(2, [[1]], [[0]])


def test_the_plan_is_free_of_torch():
    code = "import sys; import rayk.transfer.plan; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_requests_of_one_length_differ_in_their_blocks_alone():
    """What a plan remembers of a length holds no block of the request that came first."""
    specs: dict[int, KVCacheSpec] = {0: FullAttentionSpec(16, 4, 2, 2, "int8", 4)}
    specs[1] = SlidingWindowSpec(16, 4, 2, 2, "int8", 4, 20)
    producers, consumers = (make_ranks(specs, "BHLNC", tp, 40, None) for tp in (2, 1))
    known = plan_transfer(producers, consumers[0])
    for seed in range(3):
        ids = 1 + np.random.default_rng(seed).permutation(39)
        tables = [
            [
                [0 if block == 0 else int(ids[block - 1]) for block in table]
                for table in consecutive_tables(side[0], 75)
            ]
            for side in (producers, consumers)
        ]
        for rows in (None, range(32, 60)):
            found, expected = (
                plan.lower(75, *tables, rows=rows) for plan in (known, plan_transfer(producers, consumers[0]))
            )
            assert_same_reads(found, expected)


def assert_same_reads(found: list[BlockReads], expected: list[BlockReads]) -> None:
    assert [r.pattern.key for r in found] == [r.pattern.key for r in expected]
    for ours, fresh in zip(found, expected, strict=True):
        assert np.array_equal(ours.source_blocks, fresh.source_blocks)
        assert np.array_equal(ours.destination_blocks, fresh.destination_blocks)


@pytest.mark.parametrize(
    ("sizes", "grain"),
    [((16, 16), 16), ((16, 24), 8), ((64, 16), 16), ((528, 16), 16), ((1, 8), 1), ((1024, 1056), 16)],
)
@pytest.mark.parametrize("window", [None, 100])
def test_requests_that_end_in_the_same_tokens_are_planned_as_if_alone(
    sizes: tuple[int, int], grain: int, window: int | None
) -> None:
    """A plan that makes every length's reads anew gives the same."""

    def ranks(size: int, tp: int) -> list[RankGeometry]:
        full = FullAttentionSpec(size, 2, 8, 8, "bfloat16", 32)
        local = full if window is None else SlidingWindowSpec(size, 2, 8, 8, "bfloat16", 32, window)
        return make_ranks({0: full, 1: local}, "BHLNC", tp, 3000, None)

    producers, consumer = ranks(sizes[0], 2), ranks(sizes[1], 1)[0]
    plan, alone = (plan_transfer(producers, consumer) for _ in range(2))
    alone.__dict__["_grain"] = 1
    assert plan._grain == (1 if window else grain)
    for num_tokens in [*range(1, 140), *range(500, 560), *range(1015, 1090)]:
        tables = consecutive_tables(producers[0], num_tokens), consecutive_tables(consumer, num_tokens)
        assert_same_reads(plan.lower(num_tokens, *tables), alone.lower(num_tokens, *tables))
