"""Grouping: the published cases, and what must hold whatever the model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.kv.groups import group_layers, group_size, wasted_bytes
from rayk.kv.specs import KVCacheSpec, page_bytes
from tests.kv.brute import full, sliding


def model(num_full: int, num_sliding: int) -> dict[int, KVCacheSpec]:
    return {i: full() if i < num_full else sliding(9) for i in range(num_full + num_sliding)}


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "size", "groups"),
    [(10, 20, 10, 3), (13, 12, 13, 2), (2, 3, 2, 3), (4, 0, 4, 1)],
)
def test_published_groupings(num_full: int, num_sliding: int, size: int, groups: int):
    made = group_layers(model(num_full, num_sliding))
    assert len(made) == groups
    assert {g.num_positions for g in made} == {size}
    assert [g.index for g in made] == list(range(groups))


def test_published_dealing():
    """FIXTURES: 2 full + 3 sliding: (f0, f1) (s0, s2) (s1, pad)."""
    groups = group_layers(model(2, 3))
    assert [g.layers for g in groups] == [(0, 1), (2, 4), (3,)]
    assert [g.spec.kind for g in groups] == ["full", "sliding", "sliding"]
    assert wasted_bytes(groups) == (0, 0, page_bytes(full()))


def test_twelve_and_thirteen():
    groups = group_layers(model(13, 12))
    assert [len(g.layers) for g in groups] == [13, 12]
    assert wasted_bytes(groups) == (0, page_bytes(full()))


@pytest.mark.parametrize(
    ("counts", "size"), [([4], 4), ([2, 3], 2), ([3, 4], 4), ([10, 15], 10), ([10, 14], 14), ([1, 2, 6], 1)]
)
def test_group_size(counts: list[int], size: int):
    assert group_size(counts) == group_size(counts[::-1]) == size


def test_unlike_pages_waste_what_they_are_padded_by():
    wide, narrow = full(head_k=16, head_v=16), full(head_k=8, head_v=8)
    groups = group_layers({0: wide, 1: narrow, 2: wide, 3: narrow})
    assert wasted_bytes(groups) == (0, page_bytes(wide))
    assert page_bytes(wide) == 2 * page_bytes(narrow)


def test_no_layers_no_groups():
    assert group_layers({}) == ()
    assert wasted_bytes(()) == ()


KINDS = [full(), sliding(3), sliding(8), full(kv_heads=4)]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.integers(0, 40), st.sampled_from(KINDS), min_size=1))
def test_every_layer_once_with_its_own_spec(specs: dict[int, KVCacheSpec]):
    groups = group_layers(specs)
    assert sorted(layer for g in groups for layer in g.layers) == sorted(specs)
    assert len({g.num_positions for g in groups}) == 1
    for g in groups:
        assert 1 <= len(g.layers) <= g.num_positions
        assert {specs[layer] for layer in g.layers} == {g.spec}
        assert list(g.layers) == sorted(g.layers)
    assert group_layers(dict(sorted(specs.items(), reverse=True))) == groups, "order of the mapping"
    assert all(
        0 <= w < groups[0].num_positions * max(page_bytes(s) for s in KINDS) for w in wasted_bytes(groups)
    )
