"""Byte runs between geometries: fixtures, tilings of the canonical page, and agreement with addresses."""

from __future__ import annotations

import numpy as np
import pytest

from rayk.kv.geometry import RankGeometry
from rayk.kv.layout import LAYOUTS
from rayk.kv.maps import Runs, block_stride, coalesce, match_rows, page_map
from tests.kv.brute import CASES, RANK_CASES, Case, brute_addresses, brute_owners, full, ident


def tp1_map(case: Case, layout: str, tp_rank: int) -> list[tuple[int, int, int]]:
    """Runs from a rank's block to the block of TP 1 in the same layout."""
    rank = case.rank(layout, tp_rank).groups[0]
    whole = Case("tp1", case.specs, 1, case.kernel).rank(layout, 0).groups[0]
    units = rank.fields[0].units
    return match_rows(rank, whole, units, source_row=0, destination_row=0, num_rows=rank.block_size).tuples()


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
    return np.array(source), np.array(destination)


@pytest.mark.parametrize(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_page_map_names_the_canonical_byte_of_every_byte(case: Case, layout: str, tp_rank: int):
    """Moved to block 2, each source byte is described as what its canonical offset means."""
    rank = case.rank(layout, tp_rank)
    owners = brute_owners(case, layout, tp_rank)
    for group in rank.groups:
        spec = group.group.spec
        layers, content = group.group.layers, sum(f.row_bytes for f in spec.fields())
        k_bytes = spec.fields()[0].row_bytes
        shape = (spec.fields()[0].units, len(layers), spec.block_size, content)
        runs = page_map(group)
        source, destination = copied_bytes(runs)
        assert len(source) == group.page_bytes * len(layers) == runs.num_bytes
        for address, canonical in zip(source + 2 * block_stride(group), destination, strict=True):
            unit, position, row, byte = np.unravel_index(canonical, shape)
            (named,) = [c for c in owners[int(address)] if c.group == group.group.index]
            assert (named.unit, named.layer, named.row, named.block) == (unit, layers[position], row, 2)
            expected = ("k", byte) if byte < k_bytes else ("v", byte - k_bytes)
            assert (named.field, named.byte) == expected


def elected(ranks: list[RankGeometry], group: int) -> list[int]:
    """The rank that writes each unit: the first that holds it."""
    shards = [rank.groups[group].fields[0].units for rank in ranks]
    num_units = ranks[0].groups[group].fields[0].field.units
    return [next(r for r, units in enumerate(shards) if u in units) for u in range(num_units)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=ident)
def test_elected_writers_tile_the_canonical_page_once(case: Case, layout: str):
    if case.is_padded and layout == "LHBNC":
        return
    ranks = [case.rank(layout, r) for r in range(case.tp_size)]
    whole = Case("tp1", case.specs, 1, None).rank("BHLNC", 0)
    for index, group in enumerate(case.groups):
        page_bytes = whole.groups[index].page_bytes * len(group.layers)
        writes = np.zeros(page_bytes, dtype=int)
        every = np.zeros(page_bytes, dtype=int)
        writers = elected(ranks, index)
        for r, rank in enumerate(ranks):
            own = rank.groups[index]
            mine = [u for u, writer in enumerate(writers) if writer == r]
            if mine:
                per_unit = page_bytes // len(writers)
                _, destination = copied_bytes(page_map(own))
                mine_only = np.isin(destination // per_unit, mine)
                np.add.at(writes, destination[mine_only], 1)
            np.add.at(every, copied_bytes(page_map(own))[1], 1)
        assert np.all(writes == 1)
        holders = [
            sum(u in rank.groups[index].fields[0].units for rank in ranks) for u in range(len(writers))
        ]
        np.testing.assert_array_equal(every, np.repeat(holders, page_bytes // len(writers)))


@pytest.mark.parametrize("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS], ids="-".join)
def test_match_rows_between_unlike_shards_kernel_blocks_and_rows(layouts: tuple[str, str]):
    """Rows 1..3 of one side against rows 3..5 of the other, for the heads both hold, in all layout pairs."""
    here = Case("here", {0: full(kv_heads=6, query_heads=6), 1: full(kv_heads=6, query_heads=6)}, 2, 2)
    there = Case("there", {0: full(6, 6, query_heads=6), 1: full(6, 6, query_heads=6)}, 3, 3)
    source, destination = here.rank(layouts[0], 0).groups[0], there.rank(layouts[1], 1).groups[0]
    (from_bytes,), (to_bytes,) = brute_addresses(here, layouts[0], 0), brute_addresses(there, layouts[1], 1)
    units = [2]
    assert source.fields[0].units == (0, 1, 2)
    assert destination.fields[0].units == (2, 3)
    runs = match_rows(source, destination, units, source_row=1, destination_row=3, num_rows=3)
    expected: dict[int, int] = {}
    for layer in range(2):
        for i in range(3):
            row, other = 1 + i, 3 + i
            a = from_bytes[layer, row // 2, 2, row % 2]
            b = to_bytes[layer, other // 3, 0, other % 3]
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
        match_rows(group, group, [0], source_row=2, destination_row=0, num_rows=3)
    with pytest.raises(AssertionError, match="leave the destination block"):
        match_rows(group, group, [0], source_row=0, destination_row=2, num_rows=3)


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
    group = case.rank("BLHNC", 0).groups[0]
    assert match_rows(group, group, [2, 0], source_row=0, destination_row=0, num_rows=4).tuples() == [
        (0, 0, 20),
        (40, 40, 20),
    ]
    assert match_rows(group, group, [1], source_row=0, destination_row=1, num_rows=2).tuples() == [
        (20, 25, 10)
    ]
