"""Shares of a rank against their definitions, by asking every unit."""

from __future__ import annotations

import pytest

from rayk.parallel.shard import kv_heads, kv_index, query_heads, shard_range, shard_units
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
