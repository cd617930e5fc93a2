"""Shares of a rank against their definitions, by asking every unit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rayk.parallel.shard import (
    WHOLE,
    EngineShape,
    Ranges,
    Stripe,
    TokenShard,
    dcp_sizes,
    kv_heads,
    kv_index,
    query_heads,
    shard_range,
    shard_units,
    split_layers,
)
from rayk.types.errors import Unsupported
from tests.each import each

SIZES = range(1, 17)
HEADS = [(query, kv) for query in range(1, 33) for kv in range(1, query + 1) if query % kv == 0]


@each("num_units", SIZES)
@each("tp_size", SIZES)
def test_shard_units(num_units: int, tp_size: int):
    if num_units % tp_size and tp_size % num_units:
        with pytest.raises(Unsupported, match=f"{num_units} units cannot be shared by TP {tp_size}"):
            shard_units(num_units, tp_size, 0)
        return
    shares = [shard_units(num_units, tp_size, rank) for rank in range(tp_size)]
    copies = max(1, tp_size // num_units)
    assert [unit for share in shares for unit in share] == [
        u for u in range(num_units) for _ in range(copies)
    ]
    assert {len(share) for share in shares} == {max(1, num_units // tp_size)}


@each("tp_size", SIZES)
def test_shard_range_is_contiguous_and_even(tp_size: int):
    for size in (0, 1, 2, 7, 64, 1000):
        shares = [shard_range(size, tp_size, rank) for rank in range(tp_size)]
        assert [row for share in shares for row in share] == list(range(size))
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1


@each(("num_query", "num_kv"), HEADS)
def test_heads_of_a_rank(num_query: int, num_kv: int):
    """Query heads in equal contiguous shares; a rank's KV heads are the ones its query heads attend to."""
    per_kv = num_query // num_kv
    attends = {q: h for h in range(num_kv) for q in range(h * per_kv, (h + 1) * per_kv)}
    for tp_size in range(1, num_query + 1):
        if num_query % tp_size:
            with pytest.raises(Unsupported, match=f"TP {tp_size} does not divide .* {num_query} query heads"):
                query_heads(num_query, tp_size, 0)
            with pytest.raises(Unsupported):
                kv_heads(num_query, num_kv, tp_size, 0)
            continue
        dealt = [query_heads(num_query, tp_size, rank) for rank in range(tp_size)]
        assert [q for share in dealt for q in share] == list(range(num_query))
        assert len({len(share) for share in dealt}) == 1
        for rank, mine in enumerate(dealt):
            heads = kv_heads(num_query, num_kv, tp_size, rank)
            assert set(heads) == {attends[q] for q in mine}
            assert list(heads) == sorted(set(heads))
            slots = kv_index(num_query, num_kv, tp_size, rank)
            assert [heads[slot] for slot in slots] == [attends[q] for q in mine]


@each("num_kv", SIZES)
def test_kv_heads_follow_the_published_map(num_kv: int):
    """Engines split KV heads evenly, or give rank r of TP > heads the head r // (TP / heads)."""
    for tp_size in SIZES:
        if num_kv % tp_size == 0:
            share = num_kv // tp_size
            published = [tuple(range(r * share, (r + 1) * share)) for r in range(tp_size)]
        elif tp_size % num_kv == 0:
            published = [(r // (tp_size // num_kv),) for r in range(tp_size)]
        else:
            continue
        assert [kv_heads(num_kv * tp_size, num_kv, tp_size, r) for r in range(tp_size)] == published
        assert [shard_units(num_kv, tp_size, r) for r in range(tp_size)] == published


def test_named_cases():
    assert [kv_heads(8, 2, 4, r) for r in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [kv_heads(6, 2, 3, r) for r in range(3)] == [(0,), (0, 1), (1,)]
    assert kv_index(6, 2, 3, 1) == (0, 1)
    assert kv_index(6, 2, 3, 2) == (0, 0)
    assert [shard_range(10, 4, r) for r in range(4)] == [range(2), range(2, 5), range(5, 7), range(7, 10)]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_its_group_is_a_bug(rank: int):
    for ask in (
        lambda: shard_units(4, 2, rank),
        lambda: shard_range(4, 2, rank),
        lambda: kv_heads(4, 2, 2, rank),
    ):
        with pytest.raises(AssertionError):
            ask()


def test_query_heads_that_kv_heads_do_not_divide_are_a_bug():
    with pytest.raises(AssertionError):
        kv_heads(6, 4, 2, 0)


STRIPES = [(n, size, i) for n in range(1, 5) for size in (4, 8, 16) for i in range(1, 17) if size % i == 0]


def check_tokens(shard: TokenShard, block_tokens: int, held_row: list[bool]) -> None:
    """`held_row`: of each row of a block, whether the shard holds it."""
    stop = 71 + 2 * block_tokens
    held = [p for p in range(stop) if held_row[p % block_tokens]]
    assert shard.rows(block_tokens).tolist() == [row for row, is_held in enumerate(held_row) if is_held]
    assert block_tokens % shard.period == 0
    positions = np.arange(stop)
    assert shard.holds(positions).tolist() == [held_row[p % block_tokens] for p in range(stop)]
    assert shard.local(np.array(held)).tolist() == list(range(len(held)))
    assert shard.positions(np.arange(len(held))).tolist() == held
    counts = [sum(p < length for p in held) for length in range(71)]
    assert [shard.count(length) for length in range(71)] == counts
    assert shard.count(np.arange(71)).tolist() == counts


@each(("num_shards", "block_size", "interleave"), STRIPES)
def test_a_stripe_is_runs_dealt_in_turn(num_shards: int, block_size: int, interleave: int):
    owner = [p // interleave % num_shards for p in range(block_size * num_shards)]
    for index in range(num_shards):
        shard = Stripe(num_shards, index, interleave)
        check_tokens(shard, block_size * num_shards, [rank == index for rank in owner])
        assert len(shard.rows(block_size * num_shards)) == block_size


@each(("num_shards", "block_size", "interleave"), STRIPES)
def test_a_stripe_is_what_vllm_keeps(num_shards: int, block_size: int, interleave: int):
    """Slots and lengths as ComputeSlotMappingKernel and get_dcp_local_seq_lens count them."""
    for index in range(num_shards):
        shard, virtual = Stripe(num_shards, index, interleave), block_size * num_shards
        for p in range(71):
            offset = p % virtual
            is_mine = offset // interleave % num_shards == index
            slot = offset // (num_shards * interleave) * interleave + offset % interleave
            assert shard.holds(np.array([p])).tolist() == [is_mine]
            if is_mine:
                assert shard.local(np.array([p])).tolist() == [p // virtual * block_size + slot]
            base = p // interleave // num_shards * interleave
            remainder = min(max(p - base * num_shards - index * interleave, 0), interleave)
            assert shard.count(p) == base + remainder


@each("spans", [((0, 3),), ((1, 4), (6, 7)), ((0, 1), (1, 2), (5, 8))])
def test_ranges_repeat_by_the_period(spans: tuple[tuple[int, int], ...]):
    held = [any(start <= row < stop for start, stop in spans) for row in range(8)]
    check_tokens(Ranges(8, spans), 8, held)
    check_tokens(Ranges(8, spans), 16, held * 2)


def test_blocks_hold_whole_turns():
    with pytest.raises(Unsupported, match="blocks of 8 tokens do not hold whole turns of 6 tokens"):
        Stripe(3, 0, 2).rows(8)


@each("num_layers", range(1, 41))
def test_stages_are_those_of_vllm(num_layers: int):
    for pp in range(1, 7):
        if pp > num_layers:
            with pytest.raises(Unsupported, match=f"{num_layers} layers do not fill {pp} stages"):
                split_layers(num_layers, pp)
            continue
        partitions = [num_layers // pp for _ in range(pp)]
        if remaining := num_layers % pp:
            for i in range(2, remaining + 2):
                partitions[-i] += 1
        assert split_layers(num_layers, pp) == tuple(partitions)


def test_stages_may_be_counted():
    assert split_layers(7, 2, [2, 5]) == (2, 5)
    for counts in ([7], [3, 3], [0, 7], [8, -1]):
        with pytest.raises(Unsupported, match="do not divide 7 layers over 2 stages of at least one each"):
            split_layers(7, 2, counts)


def test_every_layer_unit_and_token_of_an_engine_is_held():
    shape = EngineShape(tp=4, dcp=2, dcp_interleave=3, stages=(2, 3))
    assert (shape.pp, shape.num_ranks) == (2, 8)
    shares = [shape.share(rank) for rank in range(8)]
    assert [(s.stage, s.tp_rank) for s in shares] == [*itertools.product((1, 0), range(4))]
    assert [shape.rank_of(s.stage, s.tp_rank) for s in shares] == list(range(8))
    assert [list(s.layers or ()) for s in shares[::4]] == [[2, 3, 4], [0, 1]]
    assert [s.tokens for s in shares] == [Stripe(2, rank % 2, 3) for rank in range(8)]
    assert EngineShape(3).share(2).tokens is WHOLE
    assert EngineShape(3).share(2).layers is None


@each(("num_query", "num_kv"), HEADS)
def test_tokens_are_dealt_among_ranks_that_hold_the_same_heads(num_query: int, num_kv: int):
    for tp in (n for n in range(1, 13) if num_query % n == 0):
        held = [kv_heads(num_query, num_kv, tp, rank) for rank in range(tp)]
        runs = {n: [set(held[i : i + n]) for i in range(0, tp, n)] for n in range(1, tp + 1) if tp % n == 0}
        found = dcp_sizes(num_query, num_kv, tp)
        assert found == tuple(n for n, sets in runs.items() if all(len(heads) == 1 for heads in sets))
        for size in found:
            # So that every head's tokens are all held, as often as every other's.
            holders = [[r % size for r in range(tp) if head in held[r]] for head in range(num_kv)]
            assert all(len({h.count(i) for i in range(size)}) == 1 for h in holders)
