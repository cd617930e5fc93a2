"""Addresses against memory numbered by definition (brute.py): six layouts, padding, kernel blocks, shards."""

from __future__ import annotations

import numpy as np
import pytest

from rayk.kv.geometry import canonical_page, layout_veto, plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.types.errors import Unsupported
from tests.kv.brute import (
    CASES,
    RANK_CASES,
    Case,
    brute_addresses,
    brute_owners,
    brute_units,
    content_bytes,
    full,
    ident,
    sliding,
)


@pytest.mark.parametrize(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_every_address_is_where_the_layout_puts_it(case: Case, layout: str, tp_rank: int):
    rank = case.rank(layout, tp_rank)
    for group, expected in zip(rank.groups, brute_addresses(case, layout, tp_rank), strict=True):
        positions, blocks, heads, slots, content = expected.shape
        assert (positions, slots) == (len(group.group.layers), group.kernel_block_size)
        assert blocks == case.num_blocks * group.kernel_blocks_per_block
        actual = np.empty_like(expected)
        start = 0
        for field in group.fields:
            assert len(field.units) == heads
            size = field.field.row_bytes
            for index in np.ndindex(positions, blocks, heads, slots):
                actual[index][start : start + size] = field.address(*index) + np.arange(size)
            start += size
        assert start == content
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_describe_names_every_byte_and_padding_has_no_name(case: Case, layout: str, tp_rank: int):
    rank = case.rank(layout, tp_rank)
    owners = brute_owners(case, layout, tp_rank)
    assert max(owners) < rank.pages_bytes
    for byte in range(rank.buffer_bytes):
        assert rank.describe(byte) == owners.get(byte, []), byte


@pytest.mark.parametrize(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_a_block_is_the_same_bytes_in_every_group(case: Case, layout: str, tp_rank: int):
    """Groups share block ids: bytes of block 1 in one group must never be bytes of block 2 in another."""
    rank = case.rank(layout, tp_rank)
    for byte in range(rank.pages_bytes):
        named = rank.describe(byte)
        assert len({c.block for c in named}) <= 1
        assert len({c.group for c in named}) == len(named)


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_sizes(case: Case):
    for rank_index in range(case.tp_size):
        pages = [
            len(brute_units(g.spec, case.tp_size, rank_index)) * g.spec.block_size * content_bytes(g.spec)  # type: ignore[arg-type]
            for g in case.groups
        ]
        rank = case.rank("BHLNC", rank_index)
        assert [g.page_bytes for g in rank.groups] == pages
        assert rank.block_bytes >= max(pages) * case.groups[0].num_positions
        if not case.is_padded:
            assert rank.block_bytes == pages[0] * case.groups[0].num_positions
        assert rank.pages_bytes == rank.block_bytes * case.num_blocks
        assert 0 <= rank.generations_offset - rank.pages_bytes < 64
        assert rank.generations_offset % 64 == 0
        assert rank.buffer_bytes == rank.generations_offset + 8 * case.num_blocks


def test_hybrid_canonical_allocation():
    """FIXTURES: 3 groups x 2 layers, 4 KV heads of size 8, fp16, block 16: blocks of 4096 bytes."""
    spec = full(block_size=16, kv_heads=4, head_k=8, head_v=8, dtype="float16", query_heads=4)
    window = sliding(64, spec)
    groups = group_layers({0: spec, 1: window, 2: window, 3: spec, 4: window, 5: window})
    assert [g.layers for g in groups] == [(0, 3), (1, 4), (2, 5)]
    rank = plan_rank(groups, LAYOUTS["BLHNC"], tp_size=1, tp_rank=0, num_blocks=10)
    assert [g.page_bytes for g in rank.groups] == [2048] * 3
    assert (rank.block_bytes, rank.pages_bytes) == (4096, 40960)
    starts = [g.fields[0].address(position, 7, 0, 0) for g in rank.groups for position in (0, 1)]
    assert starts == [7 * 4096, 7 * 4096 + 2048] * 3
    assert {(c.group, c.layer) for c in rank.describe(7 * 4096)} == {(0, 0), (1, 1), (2, 2)}


def test_one_block_is_one_run_where_blocks_are_outermost():
    case = Case("runs", {i: full() for i in range(3)}, 1, None, num_blocks=5)
    for layout in LAYOUTS:
        rank = case.rank(layout, 0)
        blocks = [rank.describe(byte)[0].block for byte in range(rank.pages_bytes)]
        contiguous = blocks == sorted(blocks)
        assert contiguous == rank.layout.block_outermost == (layout[0] == "B")


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_logical_blocks_become_consecutive_kernel_blocks(ratio: int):
    """FIXTURES: at ratio 2, blocks 0, 1, 2 are kernel blocks 0..5 and 3, 4 are 6..9."""
    case = Case("kernel", {0: full(block_size=4, kv_heads=1)}, 1, 4 // ratio, num_blocks=5)
    for layout in LAYOUTS:
        group = case.rank(layout, 0).groups[0]
        assert group.kernel_blocks_per_block == ratio
        kernel_blocks: dict[int, set[int]] = {}
        for kernel_block in range(5 * ratio):
            (named,) = case.rank(layout, 0).describe(group.fields[0].address(0, kernel_block, 0, 0))
            kernel_blocks.setdefault(named.block, set()).add(kernel_block)
            assert named.row == kernel_block % ratio * (4 // ratio)
        assert kernel_blocks == {b: set(range(b * ratio, (b + 1) * ratio)) for b in range(5)}


def test_replicas_are_alike():
    """FIXTURES: 2 KV heads on TP 4: ranks 0, 1 hold head 0 and ranks 2, 3 hold head 1."""
    case = Case("replicas", {0: full(kv_heads=2, query_heads=8)}, 4, None)
    for layout in LAYOUTS:
        ranks = [case.rank(layout, r) for r in range(4)]
        assert [r.groups[0].fields[0].units for r in ranks] == [(0,), (0,), (1,), (1,)]
        assert ranks[2].groups == ranks[3].groups
        assert ranks[0].groups == ranks[1].groups != ranks[2].groups


def test_six_query_heads_with_two_kv_heads_on_tp_3():
    """DESIGN: rank 1 holds both KV heads, so its pages are larger than its peers'."""
    case = Case("uneven", {0: full(kv_heads=2, query_heads=6)}, 3, None)
    ranks = [case.rank("BHLNC", r) for r in range(3)]
    assert [r.groups[0].fields[0].units for r in ranks] == [(0,), (0, 1), (1,)]
    assert ranks[1].block_bytes == 2 * ranks[0].block_bytes == 2 * ranks[2].block_bytes


def test_canonical_page_is_bhlnc_without_padding():
    specs = {0: full(kv_heads=3), 7: full(kv_heads=3), 1: sliding(9), 2: sliding(9), 3: sliding(9)}
    full_group, first, second = group_layers(specs)
    assert second.num_positions == 2
    assert len(second.layers) == 1
    for group, heads in ((full_group, 3), (first, 2), (second, 2)):
        page = canonical_page(group)
        layers = len(group.layers)
        expected = np.arange(heads * layers * 4 * 5).reshape(heads, layers, 4, 5)
        assert page.page_bytes * layers == expected.size
        for head, layer, row in np.ndindex(heads, layers, 4):
            k, v = (f.address(layer, 0, head, row) for f in page.fields)
            assert (k, v) == (expected[head, layer, row, 0], expected[head, layer, row, 3])
        assert page.fields[0].units == tuple(range(heads))


@pytest.mark.parametrize(
    ("other", "is_vetoed"),
    [
        (full(), False),
        (sliding(3), False),
        (full(head_k=2, head_v=3), False),
        (full(block_size=2, head_k=6, head_v=4), False),
        (full(head_k=2, head_v=2), True),
        (full(kv_heads=4), True),
        (full(block_size=8), True),
        (full(dtype="float16"), True),
    ],
    ids=str,
)
def test_only_lhbnc_refuses_unlike_groups(other, is_vetoed: bool):
    groups = group_layers({0: full(), 1: other})
    for layout in LAYOUTS.values():
        reason = layout_veto(groups, layout)
        assert (reason is not None) == (is_vetoed and layout.name == "LHBNC"), layout.name
    if is_vetoed:
        reason = layout_veto(groups, LAYOUTS["LHBNC"])
        assert reason is not None
        assert "(2, 20)" in reason


def test_shares_that_do_not_exist_are_refused():
    with pytest.raises(Unsupported, match="TP 5 does not divide the model's 12 query heads"):
        Case("odd", {0: full()}, 5, None).rank("BHLNC", 0)


def test_kernel_block_size_must_divide():
    with pytest.raises(AssertionError, match="kernel block size 3 does not divide 4"):
        Case("odd", {0: full()}, 1, 3).rank("BHLNC", 0)
