"""Addresses against memory numbered by definition (brute.py): six layouts, padding, kernel blocks, shards."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rayk.kv.geometry import canonical_page, layout_veto, plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.kv.layout import LAYOUTS
from rayk.types.errors import Unsupported
from tests.each import each
from tests.kv.brute import (
    CASES,
    ITEMSIZES,
    RANK_CASES,
    Case,
    brute_addresses,
    brute_bundles,
    brute_owners,
    brute_page_bytes,
    brute_rows,
    full,
    gdn,
    ident,
    keyed,
    mamba2,
    mla,
    sliding,
)
from tests.markers import thorough


@each(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_every_address_is_where_the_layout_puts_it(case: Case, layout: str, tp_rank: int):
    rank = case.rank(layout, tp_rank)
    for group, places in zip(rank.groups, brute_addresses(case, layout, tp_rank), strict=True):
        assert [f.field.name for f in group.fields] == list(places)
        for field in group.fields:
            expected = places[field.field.name]
            positions, blocks, slots, rows, size = expected.shape
            assert (positions, rows) == (len(group.group.layers), group.kernel_block_size)
            assert blocks == case.num_blocks * group.kernel_blocks_per_block
            assert (slots, size) == (len(field.units), field.field.row_bytes)
            actual = np.empty_like(expected)
            for index in np.ndindex(positions, blocks, slots, rows):
                actual[index] = field.address(*index) + np.arange(size)
            np.testing.assert_array_equal(actual, expected)
            assert np.all(actual[..., 0] % ITEMSIZES[field.field.dtype] == 0)
            if group.group.spec.part == "state":
                # Every page of every field starts where a kernel may load 16 bytes.
                assert np.all(actual[:, :, 0, :, 0] % 16 == 0)


@thorough
@each(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_describe_names_every_byte_and_padding_has_no_name(case: Case, layout: str, tp_rank: int):
    rank = case.rank(layout, tp_rank)
    owners = brute_owners(case, layout, tp_rank)
    assert max(owners) < rank.pages_bytes
    for byte in range(rank.buffer_bytes):
        assert rank.describe(byte) == owners.get(byte, []), byte


@each(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_a_block_is_the_same_bytes_in_every_group(case: Case, layout: str, tp_rank: int):
    """Groups share block ids: bytes of block 1 in one group must never be bytes of block 2 in another."""
    rank = case.rank(layout, tp_rank)
    block_of = np.full(rank.pages_bytes, -1)
    for group in rank.groups:
        mine = np.full_like(block_of, -1)
        for field in group.fields:
            sizes = (len(group.group.layers), case.num_blocks * group.kernel_blocks_per_block)
            for index in np.ndindex(*sizes, len(field.units), group.kernel_block_size):
                start = field.address(*index)
                assert np.all(mine[start : start + field.field.row_bytes] == -1), "one coordinate per group"
                mine[start : start + field.field.row_bytes] = index[1] // group.kernel_blocks_per_block
        both = (mine != -1) & (block_of != -1)
        np.testing.assert_array_equal(mine[both], block_of[both])
        block_of = np.where(mine == -1, block_of, mine)


@each("case", CASES, ids=ident)
def test_sizes(case: Case):
    for rank_index in range(case.tp_size):
        pages = [brute_page_bytes(g.spec, case.tp_size, rank_index) for g in case.groups]
        rank = case.rank("BHLNC", rank_index)
        assert [g.page_bytes for g in rank.groups] == pages
        used = [page * len(g.layers) for page, g in zip(pages, case.groups, strict=True)]
        assert rank.block_bytes >= max(used)
        # Bundles, and blocks of several, start at multiples of 16.
        packed = all(len(brute_bundles(g.spec)) == 1 for g in case.groups)
        if packed and all(g.spec.part == "attention" for g in case.groups) and len(set(pages)) == 1:
            assert rank.block_bytes == max(used)
        assert rank.pages_bytes == rank.block_bytes * case.num_blocks
        assert 0 <= rank.generations_offset - rank.pages_bytes < 64
        assert rank.generations_offset % 64 == 0
        assert rank.buffer_bytes == rank.generations_offset + 8 * case.num_blocks
        for g in rank.groups:
            rows = brute_rows(g.group.spec)
            assert (g.rows, g.rows * g.tokens_per_row) == (rows, g.block_size)


@pytest.mark.parametrize("layout", ["BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC", "LHBNC"])
def test_hybrid_canonical_allocation(layout: str):
    """FIXTURES: 3 groups x 2 layers, 4 KV heads of size 8, fp16, block 16: blocks of 4096 bytes."""
    spec = full(block_size=16, kv_heads=4, head_k=8, head_v=8, dtype="float16", query_heads=4)
    window = sliding(64, spec)
    groups = group_layers(keyed({0: spec, 1: window, 2: window, 3: spec, 4: window, 5: window}))
    assert [g.layers for g in groups] == [(0, 3), (1, 4), (2, 5)]
    rank = plan_rank(groups, LAYOUTS[layout], num_blocks=10)
    assert [g.page_bytes for g in rank.groups] == [2048] * 3
    assert (rank.block_bytes, rank.pages_bytes) == (4096, 40960)
    starts = [g.fields[0].address(position, 7, 0, 0) for g in rank.groups for position in (0, 1)]
    second = {"BHLNC": 7 * 4096 + 512, "BLHNC": 7 * 4096 + 2048, "BLNHC": 7 * 4096 + 2048}
    first = 7 * 4096 if layout[0] == "B" else 7 * 512 if layout == "LHBNC" else 7 * 2048
    assert starts == [first, second.get(layout, 20480 + first)] * 3
    assert {(c.group, c.layer) for c in rank.describe(first)} == {(0, 0), (1, 1), (2, 2)}


def test_unlike_pages_lie_side_by_side_where_blocks_are_outermost():
    """Pages of 80 (grown) and 64 bytes, two positions: a block of 160; elsewhere all are padded to 80."""
    specs = keyed({0: full(), 1: full(head_k=4, head_v=4), 2: full(), 3: full(head_k=4, head_v=4)})
    groups = group_layers(specs)
    assert [g.layers for g in groups] == [(0, 2), (1, 3)]
    for layout in ("BLHNC", "BLNHC", "LBHNC", "LBNHC"):
        rank = plan_rank(groups, LAYOUTS[layout], num_blocks=4)
        assert rank.block_bytes == 160
        large, small = (g.fields[0] for g in rank.groups)
        if layout[0] == "B":
            assert (large.layer_stride, small.layer_stride) == (80, 64)
            assert small.block_stride == large.block_stride == 160
        else:
            assert (small.layer_stride, large.layer_stride) == (320, 320)
            assert small.block_stride == large.block_stride == 80


def test_a_head_slice_of_all_layers_is_one_run_per_bundle():
    """BHLNC is B [bundle] H L N C: what a reader of half the heads takes of a block."""
    spec = mamba2(2, 8)
    rank = Case("states", dict.fromkeys(range(3), spec), 1).rank("BHLNC", 0)
    (group,) = rank.groups
    ends = [f.offset + f.unit_stride * len(f.units) for f in group.fields]
    assert [f.offset for f in group.fields] == [0, *ends[:-1]]
    assert rank.block_bytes == ends[-1]
    for f in group.fields:
        assert f.unit_stride == 3 * f.layer_stride
        assert f.layer_stride == -(-f.field.row_bytes // 16) * 16


def test_one_block_is_one_run_where_blocks_are_outermost():
    case = Case("runs", dict.fromkeys(range(3), full()), 1, num_blocks=5)
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
    full_group, first, second = group_layers(keyed(specs))
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


def test_canonical_page_of_a_state_is_bundle_after_bundle():
    """[unit, layer, byte] of each, unaligned: 2-byte taps of x, B and C, then 12-byte states."""
    (group,) = group_layers(keyed({0: mamba2(2, 4), 5: mamba2(2, 4)}))
    page = canonical_page(group)
    sizes = {"conv_x": (4, 4), "conv_b": (2, 12), "conv_c": (2, 12), "ssm": (4, 12)}
    start = 0
    for name, (units, size) in sizes.items():
        field = page.field(name)
        for unit, layer in np.ndindex(units, 2):
            assert field.address(layer, 0, unit, 0) == start + (unit * 2 + layer) * size
        start += units * 2 * size
    assert page.page_bytes * 2 == start
    with pytest.raises(KeyError):
        page.field("conv_q")


@pytest.mark.parametrize(
    ("other", "is_vetoed"),
    [
        (full(), False),
        (sliding(3), False),
        (full(head_k=2, head_v=3), False),
        (full(block_size=2, head_k=6, head_v=4), False),
        (full(head_k=2, head_v=2), True),
        (full(kv_heads=4), True),
        (full(query_heads=4), True),
        # Its pages are twice as large, so the other's blocks grow to as many tokens.
        (full(block_size=8), False),
        (full(dtype="float16"), False),
        (mla(), True),
        (mamba2(), True),
    ],
    ids=str,
)
def test_only_lhbnc_refuses_unlike_groups(other, is_vetoed: bool):
    groups = group_layers(keyed({0: full(), 1: other}))
    for layout in LAYOUTS.values():
        reason = layout_veto(groups, layout)
        assert (reason is not None) == (is_vetoed and layout.name == "LHBNC"), layout.name
    if is_vetoed:
        reason = layout_veto(groups, LAYOUTS["LHBNC"])
        assert reason is not None
        assert reason.startswith("LHBNC holds groups of one shape only: full")
        for g in groups:
            # The first bundles differ already.
            bundle = brute_bundles(g.spec)[0]
            size = sum(piece.row_bytes for piece in bundle) * brute_rows(g.spec)
            assert re.search(rf"{g.spec.kind}\b.* has {bundle[0].num_units} \w+ of {size:,} bytes", reason)


def test_what_lhbnc_refuses_is_named():
    for other, text in (
        (mamba2(), "full has 2 heads of 120 bytes (k, v), mamba2 has 12 heads of 4 bytes (conv_x)"),
        (mla(), "full has 2 heads of 40 bytes (k, v), mla has 1 latent of 64 bytes (latent, rope)"),
        (
            full(query_heads=4),
            "full (layer 0) has 2 heads of 20 bytes (k, v) for 12 query heads, "
            "full (layer 1) has 2 heads of 20 bytes (k, v) for 4 query heads",
        ),
    ):
        groups = group_layers(keyed({0: full(), 1: other}))
        assert layout_veto(groups, LAYOUTS["LHBNC"]) == f"LHBNC holds groups of one shape only: {text}"


def test_shares_that_do_not_exist_are_refused():
    with pytest.raises(Unsupported, match="TP 5 does not divide the model's 12 query heads"):
        Case("odd", {0: full()}, 5, None).rank("BHLNC", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_one_shape_may_lie_in_any_layout(layout: str):
    for spec in (mamba2(), gdn()):
        groups = group_layers(keyed(dict.fromkeys(range(4), spec)))
        assert layout_veto(groups, LAYOUTS[layout]) is None


def test_kernel_block_size_must_divide():
    with pytest.raises(AssertionError, match="kernel block size 3 does not divide 4"):
        Case("odd", {0: full()}, 1, 3).rank("BHLNC", 0)


def test_kernel_blocks_by_kind():
    """A kind's own size, else the common one, else whole blocks; a state is one row."""
    groups = group_layers(keyed({0: full(8), 1: sliding(5, full(8)), 2: mamba2(heads=2)}))
    assert [(g.spec.kind, g.spec.block_size) for g in groups] == [
        ("full", 8), ("sliding", 8), ("mamba2", 50)
    ]  # fmt: skip
    assert kernel_block_sizes(groups, None, {}) == (8, 8, 1)
    assert kernel_block_sizes(groups, 4, {}) == (4, 4, 1)
    assert kernel_block_sizes(groups, 4, {"sliding": 2}) == (4, 2, 1)
    assert kernel_block_sizes(groups, None, {"full": 2}) == (2, 8, 1)
