"""Byte runs between geometries: fixtures, tilings of the canonical page, and agreement with addresses."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rayk.kv.geometry import GroupGeometry, canonical_page
from rayk.kv.layout import LAYOUTS
from rayk.kv.maps import Runs, block_strides, coalesce, match_rows, page_map
from rayk.kv.specs import KVCacheSpec, Mamba2Spec
from tests.each import each
from tests.kv.brute import (
    CASES,
    RANK_CASES,
    Case,
    brute_addresses,
    brute_bundles,
    brute_owners,
    brute_rows,
    full,
    gdn,
    ident,
    mamba1,
    mamba2,
    mla,
    sliding,
)
from tests.markers import thorough


def tp1_map(case: Case, layout: str, tp_rank: int) -> list[tuple[int, int, int]]:
    """Runs from a rank's block to the block of TP 1 in the same layout."""
    rank = case.rank(layout, tp_rank).groups[0]
    whole = Case("tp1", case.specs, 1, case.kernel).rank(layout, 0).groups[0]
    units = all_units(rank)
    return match_rows(rank, whole, units, source_row=0, destination_row=0, num_rows=rank.rows).tuples()


def all_units(group: GroupGeometry) -> dict[str, tuple[int, ...]]:
    return {f.field.name: f.units for f in group.fields}


FIXTURE = {0: full(block_size=4, kv_heads=8, head_k=64, head_v=64, query_heads=8)}


def test_published_map_of_packed_nhd():
    """FIXTURES: block 4, 2 heads per rank, head size 64, int8, TP 4, rank 2."""
    assert tp1_map(Case("nhd", FIXTURE, 4, None), "BLNHC", 2) == [
        (0, 512, 256), (256, 1536, 256), (512, 2560, 256), (768, 3584, 256)
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["BLHNC", "BHLNC", "LBHNC"])
def test_published_map_of_packed_hnd(layout: str):
    """FIXTURES: the same in HND order, rank 1: one run."""
    assert tp1_map(Case("hnd", FIXTURE, 4, None), layout, 1) == [(0, 1024, 1024)]


@pytest.mark.parametrize("layout", ["BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC"])
def test_published_map_of_a_single_rank(layout: str):
    """FIXTURES: 2 heads on one rank are one run in any order (LHBNC: a block is not one stretch)."""
    specs = {0: full(block_size=4, kv_heads=2, head_k=64, head_v=64, query_heads=8)}
    assert tp1_map(Case("single", specs, 1, None), layout, 0) == [(0, 0, 1024)]


def test_replicas_have_identical_runs():
    """FIXTURES: GQA with 2 KV heads on TP 4: ranks 2 and 3."""
    case = Case("replicas", {0: full(query_heads=8), 1: full(query_heads=8)}, 4, None)
    for layout in LAYOUTS:
        maps = [page_map(case.rank(layout, r).groups[0]).tuples() for r in range(4)]
        assert maps[2] == maps[3] != maps[0] == maps[1]


def copied_bytes(runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    source = [s + i for s, _, n in runs.tuples() for i in range(n)]
    destination = [d + i for _, d, n in runs.tuples() for i in range(n)]
    return np.array(source, dtype=np.int64), np.array(destination, dtype=np.int64)


def canonical_bytes(spec: KVCacheSpec, num_layers: int) -> list[tuple[str, int, int, int, int]]:
    """(field, unit, position, row, byte) of every byte of the canonical page, in order."""
    return [
        (piece.name, unit, position, row, byte)
        for bundle in brute_bundles(spec)
        for unit in range(bundle[0].num_units)
        for position in range(num_layers)
        for row in range(brute_rows(spec))
        for piece in bundle
        for byte in range(piece.row_bytes)
    ]


@each(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_page_map_names_the_canonical_byte_of_every_byte(case: Case, layout: str, tp_rank: int):
    """Moved to the last block, each source byte is what its canonical offset means."""
    rank = case.rank(layout, tp_rank)
    owners = brute_owners(case, layout, tp_rank)
    block = case.num_blocks - 1
    for group in rank.groups:
        layers = group.group.layers
        named = canonical_bytes(group.group.spec, len(layers))
        runs = page_map(group)
        assert runs.num_bytes == group.page_bytes * len(layers)
        source, destination = copied_bytes(runs)
        assert len(np.unique(destination)) == len(destination)
        strides = np.repeat(block_strides(group, runs.source), runs.lengths)
        for address, canonical in zip(source + block * strides, destination, strict=True):
            (found,) = [c for c in owners[int(address)] if c.group == group.group.index]
            name, unit, position, row, byte = named[canonical]
            assert found.block == block
            assert (found.field, found.unit, found.row, found.byte) == (name, unit, row, byte)
            assert found.layer == layers[position]


@each("layout", LAYOUTS)
@each("case", CASES, ids=ident)
def test_elected_writers_tile_the_canonical_page_once(case: Case, layout: str):
    """The first rank that holds a unit writes it; all ranks together write each byte once per holder."""
    if not case.fits(layout):
        return
    ranks = [case.rank(layout, r) for r in range(case.tp_size)]
    for index, group in enumerate(case.groups):
        named = canonical_bytes(group.spec, len(group.layers))
        pieces = {p.name: p for bundle in brute_bundles(group.spec) for p in bundle}
        holders = {
            (name, unit): [r for r in range(case.tp_size) if unit in piece.units(case.tp_size, r)]
            for name, piece in pieces.items()
            for unit in range(piece.num_units)
        }
        writes, every = np.zeros(len(named), dtype=int), np.zeros(len(named), dtype=int)
        for r, rank in enumerate(ranks):
            own = rank.groups[index]
            mine = {
                name: [u for u in range(piece.num_units) if holders[name, u][0] == r]
                for name, piece in pieces.items()
            }
            runs = match_rows(
                own,
                canonical_page(own.group),
                mine,
                source_row=0,
                destination_row=0,
                num_rows=own.rows,
            )
            np.add.at(writes, copied_bytes(runs)[1], 1)
            np.add.at(every, copied_bytes(page_map(own))[1], 1)
        assert np.all(writes == 1)
        assert every.tolist() == [len(holders[name, unit]) for name, unit, *_ in named]


# Every kind, alone and mixed; heads that both sizes of each pair divide.
MOVED: dict[str, dict[int, KVCacheSpec | tuple[KVCacheSpec, ...]]] = {
    "full": {0: full(), 1: full()},
    "sliding": {0: sliding(5, full(kv_heads=6)), 1: full(kv_heads=6)},
    "mla": {0: mla(), 1: mla()},
    "mamba1": {0: mamba1(channels=16 * 12), 1: mamba1(channels=16 * 12)},
    "mamba2-1": dict.fromkeys(range(3), mamba2(1)),
    "mamba2-2": dict.fromkeys(range(3), mamba2(2)),
    "mamba2-8": dict.fromkeys(range(2), mamba2(8, 24)),
    "gdn": dict.fromkeys(range(2), gdn(value_heads=12)),
    "side-by-side": {0: (full(), mamba2(2)), 1: (full(), mamba2(2))},
    "latent-and-delta": {0: mla(), 1: gdn(value_heads=12), 2: gdn(value_heads=12)},
}
TP_PAIRS = [(3, 2), (4, 6), (6, 4), (2, 3), (1, 4), (4, 1)]
LAYOUT_PAIRS = [("BHLNC", "LBNHC"), ("LHBNC", "BLNHC"), ("LBHNC", "LHBNC"), ("BLHNC", "BHLNC")]


@thorough
@each("layouts", LAYOUT_PAIRS, ids="-".join)
@each("tp", TP_PAIRS, ids=str)
@each("kind", MOVED)
def test_runs_between_any_two_shards_join_what_means_the_same(
    kind: str, tp: tuple[int, int], layouts: tuple[str, str]
):
    """From block 0 of every rank of one side to block 0 of every rank of the other, for all units both hold:
    the bytes that runs join have one canonical name, and each that both hold is there once."""
    sides = [Case(kind, MOVED[kind], size) for size in tp]
    for side, layout in zip(sides, layouts, strict=True):
        if not side.fits(layout):
            return
    for source_rank in range(tp[0]):
        for destination_rank in range(tp[1]):
            check_runs(*sides, layouts, (source_rank, destination_rank))


def check_runs(here: Case, there: Case, layouts: tuple[str, str], ranks: tuple[int, int]) -> None:
    source, destination = here.rank(layouts[0], ranks[0]), there.rank(layouts[1], ranks[1])
    places = brute_addresses(here, layouts[0], ranks[0]), brute_addresses(there, layouts[1], ranks[1])
    for index, (a, b) in enumerate(zip(source.groups, destination.groups, strict=True)):
        expected: dict[int, int] = {}
        both = {}
        for f in a.fields:
            name = f.field.name
            other = b.field(name).units
            both[name] = [u for u in f.units if u in other]
            for unit in both[name]:
                # Block 0 is kernel block 0 here: the cases have none of their own.
                from_bytes = places[0][index][name][:, 0, f.units.index(unit)]
                to_bytes = places[1][index][name][:, 0, other.index(unit)]
                pairs = zip(to_bytes.reshape(-1).tolist(), from_bytes.reshape(-1).tolist(), strict=True)
                expected |= dict(pairs)
        runs = match_rows(a, b, both, source_row=0, destination_row=0, num_rows=a.rows)
        from_copied, to_copied = copied_bytes(runs)
        assert len(to_copied) == len(expected)
        assert dict(zip(to_copied.tolist(), from_copied.tolist(), strict=True)) == expected


@each("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS], ids="-".join)
def test_match_rows_between_unlike_shards_kernel_blocks_and_rows(layouts: tuple[str, str]):
    """Rows 1..3 of one side against rows 3..5 of the other, for the heads both hold, in all layout pairs."""
    here = Case("here", {0: full(kv_heads=6, query_heads=6), 1: full(kv_heads=6, query_heads=6)}, 2, 2)
    there = Case("there", {0: full(6, 6, query_heads=6), 1: full(6, 6, query_heads=6)}, 3, 3)
    source, destination = here.rank(layouts[0], 0).groups[0], there.rank(layouts[1], 1).groups[0]
    (from_fields,), (to_fields,) = brute_addresses(here, layouts[0], 0), brute_addresses(there, layouts[1], 1)
    units = {"k": [2], "v": [2]}
    assert source.fields[0].units == (0, 1, 2)
    assert destination.fields[0].units == (2, 3)
    runs = match_rows(source, destination, units, source_row=1, destination_row=3, num_rows=3)
    expected: dict[int, int] = {}
    for name, layer, i in product("kv", range(2), range(3)):
        row, other = 1 + i, 3 + i
        a = from_fields[name][layer, row // 2, 2, row % 2]
        b = to_fields[name][layer, other // 3, 0, other % 3]
        expected |= dict(zip(b.tolist(), a.tolist(), strict=True))
    from_copied, to_copied = copied_bytes(runs)
    assert len(to_copied) == len(expected)
    assert dict(zip(to_copied.tolist(), from_copied.tolist(), strict=True)) == expected
    ends = runs.destination[:-1] + runs.lengths[:-1]
    assert np.all(ends <= runs.destination[1:]), "ascending, disjoint"
    joined = (ends == runs.destination[1:]) & (runs.source[:-1] + runs.lengths[:-1] == runs.source[1:])
    assert not joined.any(), "neighbours that continue on both sides are joined"


def test_rows_must_stay_in_their_blocks():
    group = Case("rows", {0: full()}, 1, None).rank("BHLNC", 0).groups[0]
    with pytest.raises(AssertionError, match="leave the source block"):
        match_rows(group, group, {"k": [0]}, source_row=2, destination_row=0, num_rows=3)
    with pytest.raises(AssertionError, match="leave the destination block"):
        match_rows(group, group, {"k": [0]}, source_row=0, destination_row=2, num_rows=3)
    (state,) = Case("row", {0: mamba2()}, 1).rank("BHLNC", 0).groups
    with pytest.raises(AssertionError, match="leave the source block"):
        match_rows(state, state, {"ssm": [0]}, source_row=0, destination_row=0, num_rows=2)


def test_coalesce_joins_only_what_continues_on_both_sides():
    def runs(*rows: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        return coalesce(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))).tuples()

    assert runs((0, 8, 4), (4, 12, 4)) == [(0, 8, 8)]
    assert runs((4, 12, 4), (0, 8, 4)) == [(0, 8, 8)]
    assert runs((0, 8, 4), (5, 12, 4)) == [(0, 8, 4), (5, 12, 4)]
    assert runs((0, 8, 4), (4, 13, 4)) == [(0, 8, 4), (4, 13, 4)]
    assert runs((9, 0, 1), (0, 1, 2), (2, 3, 3), (7, 6, 1)) == [(9, 0, 1), (0, 1, 5), (7, 6, 1)]
    empty = coalesce(*(np.empty(0, dtype=np.int64) for _ in range(3)))
    assert len(empty) == empty.num_bytes == 0


def test_units_may_be_chosen():
    case = Case("units", {0: full(kv_heads=3, query_heads=3)}, 1, None)
    group = case.rank("BHLNC", 0).groups[0]

    def runs(units: dict[str, list[int]], destination_row: int, num_rows: int) -> list[tuple[int, int, int]]:
        rows = {"source_row": 0, "destination_row": destination_row, "num_rows": num_rows}
        return match_rows(group, group, units, **rows).tuples()

    assert runs({"k": [2, 0], "v": [0, 2]}, 0, 4) == [(0, 0, 20), (40, 40, 20)]
    assert runs({"k": [1], "v": [1]}, 1, 2) == [(20, 25, 10)]
    assert runs({"v": [1]}, 0, 2) == [(23, 23, 2), (28, 28, 2)]
    assert runs({}, 0, 4) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_blocks_are_one_number_but_inside_heads(layout: str):
    spec = Mamba2Spec(9, "float32", conv_width=4, num_heads=4, head_size=4, num_groups=2, state_size=5)
    group = Case("states", dict.fromkeys(range(2), spec), 1).rank(layout, 0).groups[0]
    at = np.array([f.address(1, 0, 0, 0) for f in group.fields])
    expected = [f.address(1, 1, 0, 0) - f.address(1, 0, 0, 0) for f in group.fields]
    assert block_strides(group, at).tolist() == expected
    assert (len(set(expected)) > 1) == (layout == "LHBNC")
