"""Groups that ride: which they are, and where their bytes lie, against memory numbered by definition."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayk.kv.caches import allocate
from rayk.kv.geometry import RankGeometry, layout_veto, plan_rank
from rayk.kv.groups import KVCacheGroup, group_layers, max_request_blocks, measure_groups
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.kv.layout import LAYOUTS
from rayk.kv.maps import match_rows, page_map
from rayk.kv.request_memory import measure_request_memory
from rayk.kv.riders import Riders, add_riders, of_groups, tabled
from rayk.kv.specs import KVCacheSpec, page_bytes, with_block_size
from rayk.parallel.shard import EngineShape
from rayk.types.errors import Unsupported
from tests.each import each
from tests.kv.brute import (
    Case,
    brute_addresses,
    brute_bundles,
    chunked,
    full,
    gdn,
    keyed,
    mamba2,
    mla,
    sliding,
)
from tests.kv.test_caches import fields_of
from tests.markers import thorough

CPU = torch.device("cpu")
FIRST = 10
"""Draft layer 0 of every case."""
HYBRID = {0: full(), 1: full(), 2: sliding(3), 3: sliding(3), 4: sliding(3)}
TARGETS = [
    Case("alone", {0: full(), 5: full()}, 4),
    Case("kernel-blocks", {0: full(), 5: full()}, 2, 2),
    Case("windows", HYBRID, 2, 2),
    Case("states", {0: (full(kv_heads=1, head_k=1, head_v=1), mamba2(heads=4))}, 4),
    Case("latents", {0: mla(), 2: mla()}, 1),
    Case("delta", {0: gdn(value_heads=4), 1: full(block_size=2)}, 2),
]
NVFP4 = full(kv_heads=4, query_heads=8, head_k=32, head_v=16, dtype="nvfp4")
DRAFTS: dict[str, dict[int, KVCacheSpec]] = {
    "head": {FIRST: full(kv_heads=4, head_k=5, head_v=5, query_heads=4)},
    "wider": dict.fromkeys((FIRST, FIRST + 1), full(4, 4, 7, 3, "float32", 8)),
    "latents": {FIRST: mla(latent=3, rope=2, dtype="bfloat16")},
    "two-kinds": {FIRST: mla(4, 3, 3), FIRST + 1: full(4, 2, query_heads=4), FIRST + 2: mla(4, 3, 3)},
    "two-bundles": {FIRST: NVFP4, FIRST + 1: NVFP4},
}  # fmt: skip
RANKS = [
    (case, draft, layout, draft_tp, rank)
    for case, draft, layout in itertools.product(TARGETS, DRAFTS, LAYOUTS)
    if case.fits(layout)
    for draft_tp in (1, 2, 4)
    if case.tp_size % draft_tp == 0
    for rank in sorted({0, case.tp_size - 1})
]


def ridden(case: Case, draft: str) -> tuple[KVCacheGroup, ...]:
    return add_riders(case.groups, keyed(DRAFTS[draft]))


def lay_out(case: Case, draft: str, layout: str, draft_tp: int, rank: int) -> RankGeometry:
    groups = ridden(case, draft)
    return plan_rank(
        groups,
        LAYOUTS[layout],
        shape=EngineShape(case.tp_size, draft_tp=draft_tp),
        rank=rank,
        num_blocks=case.num_blocks,
        kernel_block_sizes=kernel_block_sizes(groups, case.kernel, case.kernel_by_kind),
    )


def alone(case: Case, group: KVCacheGroup, draft_tp: int) -> Case:
    """The rider as a model of its own, on the ranks that share it."""
    specs = dict.fromkeys(group.layers, group.spec)
    return Case("rider", specs, draft_tp, case.kernel, case.num_blocks, case.kernel_by_kind)


def check_every_byte(case: Case, draft: str, layout: str, draft_tp: int, rank: int) -> None:
    """Each (layer, block, head, token, byte) lies where the layout puts it in a region of its own; the
    model's lie where they do without a drafter."""
    geometry = lay_out(case, draft, layout, draft_tp, rank)
    plain = case.rank(layout, rank)
    num_own = len(plain.groups)
    assert geometry.groups[:num_own] == plain.groups
    used = np.zeros(geometry.buffer_bytes, dtype=np.int64)
    used[: plain.pages_bytes] = 1
    for group in geometry.groups[num_own:]:
        region = geometry.region_of(group.group.index)
        assert region.offset % 64 == 0
        places = brute_addresses(alone(case, group.group, draft_tp), layout, rank % draft_tp)[0]
        assert [f.field.name for f in group.fields] == list(places)
        for field in group.fields:
            expected = places[field.field.name]
            assert expected.shape[:2] == (len(group.layers), case.num_blocks * group.kernel_blocks_per_block)
            assert expected.shape[2:] == (len(field.units), group.kernel_block_size, field.field.row_bytes)
            actual = np.empty_like(expected)
            for index in np.ndindex(*expected.shape[:4]):
                actual[index] = field.address(*index) + np.arange(expected.shape[4])
            np.testing.assert_array_equal(actual - region.offset, expected)
            np.add.at(used, actual.ravel(), 1)
    assert used.max() == 1, "bytes of two caches in one place"
    assert not used[geometry.pages_bytes :].any(), "bytes behind the pages"
    assert geometry.pages_bytes >= case.num_blocks * geometry.block_bytes


@each(("case", "draft", "layout", "draft_tp", "rank"), RANKS[::7], ids=str)
def test_every_byte_of_a_rider_is_its_own(
    case: Case, draft: str, layout: str, draft_tp: int, rank: int
) -> None:
    check_every_byte(case, draft, layout, draft_tp, rank)


@thorough
@each(("case", "draft", "layout", "draft_tp", "rank"), RANKS, ids=str)
def test_every_byte_of_every_rider_is_its_own(
    case: Case, draft: str, layout: str, draft_tp: int, rank: int
) -> None:
    check_every_byte(case, draft, layout, draft_tp, rank)


@each(("case", "draft", "layout", "draft_tp", "rank"), RANKS[1::13], ids=str)
def test_what_a_drafter_writes_through_its_views_is_named_so(
    case: Case, draft: str, layout: str, draft_tp: int, rank: int
):
    """Each element written through a view changes the bytes at its address and no others; `describe` names
    them by group, layer, head and token, and the tensors cover them once."""
    geometry = lay_out(case, draft, layout, draft_tp, rank)
    caches = allocate(geometry, CPU, fill=0)
    memory = caches.buffer.view(torch.uint8).numpy()
    start = caches.buffer.untyped_storage().data_ptr()
    covered = np.zeros(geometry.buffer_bytes, dtype=np.int64)
    for tensor in caches.tensors:
        at = tensor.data_ptr() - start
        rows = np.arange(tensor.shape[0])[:, None] * tensor.stride(0) + np.arange(tensor.shape[1])
        np.add.at(covered, (at + rows).ravel(), 1)
    for region in geometry.regions:
        end = region.offset + geometry.num_blocks * region.block_bytes
        assert np.all(covered[region.offset : end] == 1)
    for group in (g for g in geometry.groups if g.group.rides is not None):
        for position, key in enumerate(group.keys):
            for name, view in fields_of(caches, key).items():
                field = group.field(name)
                for index in np.ndindex(*view.shape[:3]):
                    memory[:] = 0
                    view[index].view(torch.uint8).fill_(0xA5)
                    found = np.flatnonzero(memory)
                    first = field.address(position, *index)
                    np.testing.assert_array_equal(found, np.arange(first, first + field.field.row_bytes))
                (named,) = geometry.describe(first)
                block, kernel_block = divmod(index[0], group.kernel_blocks_per_block)
                assert (named.group, named.layer, named.field) == (group.group.index, key[0], name)
                assert (named.block, named.unit) == (block, field.units[index[1]])
                assert named.row == kernel_block * group.kernel_block_size + index[2]


@each(("draft", "layouts"), itertools.product(DRAFTS, itertools.permutations(LAYOUTS, 2)), ids=str)
def test_riders_move_between_any_layouts_and_tp(draft: str, layouts: tuple[str, str]):
    """A rider's block of one engine, copied by the run algebra into one of another layout and TP, is the same
    numbers through both views."""
    case = TARGETS[0]
    here = allocate(lay_out(case, draft, layouts[0], 1, 0), CPU, fill=0)
    there = allocate(lay_out(case, draft, layouts[1], 4, 2), CPU, fill=0x5A)
    seed = torch.Generator().manual_seed(7)
    here.buffer.copy_(torch.randint(-128, 127, here.buffer.shape, generator=seed, dtype=torch.int8))
    for ours, theirs in zip(here.geometry.groups, there.geometry.groups, strict=True):
        if ours.group.rides is None:
            continue
        units = {f.field.name: f.units for f in theirs.fields}
        whole = {"source_row": 0, "destination_row": 0, "num_rows": ours.block_rows}
        runs = match_rows(ours, theirs, units, **whole)
        for block in range(case.num_blocks):
            for source, to, length in runs.tuples():
                a = source + block * _stride(ours, source)
                b = to + block * _stride(theirs, to)
                there.buffer[b : b + length] = here.buffer[a : a + length]
        assert page_map(theirs).num_bytes == theirs.page_bytes * len(theirs.layers)
        for key in ours.keys:
            mine, its = fields_of(here, key), fields_of(there, key)
            for name, view in its.items():
                slots = list(theirs.field(name).units)
                wanted = mine[name][:, slots].contiguous().view(torch.uint8)
                assert torch.equal(view.contiguous().view(torch.uint8), wanted), (key, name)


def _stride(group, address: int) -> int:  # noqa: ANN001 - a GroupGeometry
    """Bytes to the same place in the next block, of the field in whose rows an address lies."""
    for f in group.fields:
        for layer, slot, row in np.ndindex(len(group.layers), len(f.units), group.kernel_block_size):
            for block in range(group.kernel_blocks_per_block):
                first = f.address(layer, block, slot, row)
                if first <= address < first + f.field.row_bytes:
                    return f.block_stride * group.kernel_blocks_per_block
    raise AssertionError(address)


def test_riders_come_last_and_share_the_first_table_that_keeps_all():
    groups = group_layers(keyed({0: sliding(3), 1: full(), 2: mamba2()}))
    kinds = [g.spec.kind for g in groups]
    found = add_riders(groups, Riders(keyed(DRAFTS["two-kinds"]), drafter="d"))
    assert found[: len(groups)] == groups
    riders = found[len(groups) :]
    assert [g.layers for g in riders] == [(FIRST, FIRST + 2), (FIRST + 1,)]
    for g in riders:
        assert (g.rides, g.first_draft, g.drafter) == (kinds.index("full"), FIRST, "d")
        assert g.spec.block_size == groups[kinds.index("full")].spec.block_size
        assert g.num_positions == len(g.layers)
    assert [riders[0].name_of(n) for n in riders[0].layers] == ["draft layer 0", "draft layer 2"]
    assert groups[0].name_of(0) == "layer 0"
    assert add_riders(groups, {}) == groups


def test_who_keeps_tables_knows_nothing_of_riders_but_their_lane():
    groups = ridden(TARGETS[2], "two-kinds")
    own = tabled(groups)
    assert [g.index for g in own] == [g.index for g in groups if g.rides is None]
    (carrier,) = [g for g in own if g.carries is not None]
    assert carrier.spec.kind == "full"
    assert len(carrier.lanes) == len(carrier.own_lanes) + 1
    assert [replace(g, carries=None) for g in own] == list(TARGETS[2].groups)
    tables = tuple(f"table {g.index}" for g in own)
    assert of_groups(groups, tables) == (*tables, *[tables[carrier.index]] * 2)
    for num_tokens in (1, 5, 40):
        assert max_request_blocks(groups, num_tokens, 8) == max_request_blocks(own, num_tokens, 8)


def test_layouts_are_vetoed_for_the_model_alone():
    for case, draft, layout in itertools.product(TARGETS, DRAFTS, LAYOUTS.values()):
        groups = ridden(case, draft)
        sizes = kernel_block_sizes(groups, case.kernel, case.kernel_by_kind)
        own = kernel_block_sizes(case.groups, case.kernel, case.kernel_by_kind)
        assert sizes[: len(own)] == own
        assert layout_veto(groups, layout, sizes) == layout_veto(case.groups, layout, own)


@pytest.mark.parametrize(
    ("target", "draft", "text"),
    [
        ({0: sliding(3), 1: mamba2()}, {FIRST: full()}, r"\(it has sliding, mamba2\).*hybrid_kv: false"),
        ({0: chunked(6)}, {FIRST: full()}, r"it has chunked"),
        ({0: full()}, {FIRST: mamba2()}, r"draft layer 0 keeps a mamba2 cache"),
        ({0: full()}, {FIRST: full(), FIRST + 1: sliding(3)}, r"draft layer 1 keeps a sliding cache"),
    ],
)
def test_what_cannot_ride_is_refused(
    target: Mapping[int, KVCacheSpec], draft: Mapping[int, KVCacheSpec], text: str
):
    with pytest.raises(Unsupported, match=text):
        add_riders(group_layers(keyed(target)), keyed(draft))


def test_a_window_of_a_drafter_is_seen_and_all_is_kept():
    kept, seen = {(FIRST, "attention"): full()}, {(FIRST, "attention"): sliding(3)}
    (_, rider) = add_riders(TARGETS[4].groups, Riders(kept, seen))
    assert rider.spec == with_block_size(full(), TARGETS[4].groups[0].spec.block_size)
    assert rider.seen_by(FIRST).live_rows(20) == range(18, 20)


def test_drafts_and_stages_or_unfit_heads_are_refused():
    groups = ridden(TARGETS[0], "head")
    with pytest.raises(Unsupported, match="a drafter's layers and pipeline stages"):
        plan_rank(groups, LAYOUTS["BHLNC"], num_blocks=2, shape=EngineShape(stages=(3, 3)))
    odd = add_riders(TARGETS[0].groups, keyed({FIRST: full(query_heads=6, kv_heads=2)}))
    with pytest.raises(Unsupported, match="TP 4 does not divide the model's 6 query heads"):
        plan_rank(odd, LAYOUTS["BHLNC"], num_blocks=2, shape=EngineShape(4, draft_tp=4))
    plan_rank(odd, LAYOUTS["BHLNC"], num_blocks=2, shape=EngineShape(4, draft_tp=2))


def test_waste_counts_the_pages_of_riders_in_other_groups_blocks():
    """By hand: 10 tokens are 3 blocks of full attention, of which 2 rows are spare, and 1 of the window (the
    last 2 rows before the next). Each of the 4 blocks has a page of the rider."""
    groups = add_riders(group_layers(keyed({0: full(), 1: sliding(3)})), keyed({FIRST: mla()}))
    of_full, window, rider = measure_groups(groups, 10)
    assert (of_full, window) == measure_groups(groups[:2], 10)
    row = page_bytes(mla()) // 4
    assert (rider.used_bytes, rider.wasted_bytes, rider.padding_bytes) == (10 * row, 2 * row, 4 * row)
    for draft_tp, copies in ((1, 4), (2, 4), (4, 4)):  # a latent is on every rank
        memory = measure_request_memory(groups, 4, [10], draft_tp=draft_tp)[-1]
        assert memory.replicated_bytes == (copies - 1) * 12 * row
    heads = add_riders(group_layers(keyed({0: full()})), keyed({FIRST: full(kv_heads=4, query_heads=4)}))
    for draft_tp, copies in ((1, 4), (2, 2), (4, 1)):
        memory = measure_request_memory(heads, 4, [10], draft_tp=draft_tp)[-1]
        assert memory.replicated_bytes == (copies - 1) * 12 * (
            page_bytes(full(kv_heads=4, query_heads=4)) // 4
        )


def test_bundles_of_each_draft_are_told_apart():
    """The cases have one bundle and two, so that both ways of laying out are met."""
    assert {len(brute_bundles(s)) for specs in DRAFTS.values() for s in specs.values()} == {1, 2}
