"""What pairs of tensor-parallel sizes cost, of rows made by hand: what is compared, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from rayk.reports import ResultWriter, load
from rayk.reports.result import Result
from rayk.reports.tp_cost import cost_sides, cost_table, unequal_cost, unequal_pairs
from rayk.reports.tp_pairs import pair_grids, pair_rows
from tests.markers import one_per
from tests.reports.synthetic import MS, SPEC, cell_row
from tests.reports.test_report_numbers import request_row, transfer_row, write

SIZES = (1, 2, 4)


def moved_run(folder: Path, took: dict[tuple[int, int], list[int]]) -> Result:
    """A cell per pair of sizes whose transfers took so many ms: one number per repeat, of 3 prompts of which
    each takes 100 ms longer than the one before."""
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={})
    for (prefill, decode), repeats in took.items():
        cell = cell_row(prefill, decode, ("BHLNC", "BHLNC"))
        rows, transfers = [], []
        for repeat, ms in enumerate(repeats):
            for number in range(3):
                row = request_row(cell, number, 60)
                moved = transfer_row(cell, number, 0, transfer_ns=(ms + 100 * number) * MS)
                row.repeat = moved.repeat = repeat
                rows.append(row)
                transfers.append(moved)
        writer.write_cell(cell, rows, transfers)
    writer.finish()
    return load(folder)


def told(result: Result) -> dict[str, list[str]]:
    """Rows of the answer's table by title."""
    return {row[0]: row[1:] for row in cost_table(result)}


@one_per()
@pytest.mark.parametrize(
    "dropped", [(), ((1, 2), (1, 4)), ((1, 2), (2, 4)), ((1, 1), (2, 1)), ((4, 4),)], ids=str
)
def test_what_depends_on_the_decode_size_alone_is_no_cost_of_unequal_sizes(
    tmp_path: Path, dropped: tuple[tuple[int, int], ...]
) -> None:
    sizes = [(p, d) for p in SIZES for d in SIZES if (p, d) not in dropped]
    result = moved_run(tmp_path, {(p, d): [d * d] * 4 for p, d in sizes})
    assert unequal_cost(result).startswith("Nothing that can be told from chance")
    sides = cost_sides(unequal_pairs(result))
    assert [side.more_ms for side in sides] == [0.0] * len(sides)
    assert {side.times for side in sides} == {1.0}


@one_per()
@pytest.mark.parametrize("factor", [2, 0.5])
def test_a_cost_of_either_side_is_told_apart(tmp_path: Path, factor: float) -> None:
    """Above its prefill size a decode size costs nothing, below it twice as much, or half; prompts alike."""

    def ms(prefill: int, decode: int) -> list[int]:
        # Repeats differ by more than sizes do.
        return [int((100 * decode + 40 * r) * (factor if prefill > decode else 1)) for r in range(4)]

    result = moved_run(tmp_path, {(p, d): ms(p, d) for p in SIZES for d in SIZES})
    below, above = cost_sides(unequal_pairs(result))
    assert (below.name, below.is_told, below.times, below.more_ms) == ("P < D", False, 1.0, 0.0)
    assert (above.name, above.is_told, above.num_pairs, above.num_units) == ("P > D", True, 36, 8)
    # Of decode TP 1 (two prefill sizes) and 2, at 100 to 320 ms each; of the middle prompt, which takes
    # 100 ms more at both.
    more = sorted((factor - 1) * (100 * d + 40 * r) for d in (1, 2) for r in range(4))
    assert above.more_ms == pytest.approx((more[3] + more[4]) / 2)
    assert above.interval == pytest.approx((more[0], more[-1]))
    text = unequal_cost(result)
    word = "more" if factor > 1 else "less"
    assert text.startswith(
        f"{abs(above.more_ms):.2f} ms ({above.times:.2f} times) {word} per request where P > D"
    )
    assert "; nothing that can be told from chance where P < D." in text


def test_twice_the_time_is_twice(tmp_path: Path) -> None:
    """Of prompts that are alike the ratio is the factor, whatever the decode size."""
    took = {(p, d): [10 * d * (1 + (p != d)) for _ in range(4)] for p in SIZES for d in SIZES}
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for (prefill, decode), repeats in took.items():
        cell = cell_row(prefill, decode, ("BHLNC", "BHLNC"))
        rows = [request_row(cell, 0, 60) for _ in repeats]
        moved = [transfer_row(cell, 0, 0, transfer_ns=ms * MS) for ms in repeats]
        for repeat, (row, transfer) in enumerate(zip(rows, moved, strict=True)):
            row.repeat = transfer.repeat = repeat
        writer.write_cell(cell, rows, moved)
    writer.finish()
    result = load(tmp_path)
    assert told(result)["times"] == ["2.00", "2.00"]
    # P < D: 20 and 40 ms more at decode TP 2 and 4; P > D: 10 and 20 at 1 and 2.
    assert told(result)["more, ms"] == ["+30.00", "+15.00"]
    assert told(result)["its 95% interval"] == ["+20.00 to +40.00", "+10.00 to +20.00"]
    assert unequal_cost(result).startswith("30.00 ms (2.00 times) more per request where P < D")
    assert len(unequal_cost(result).split(". ")) <= 2


def test_few_repeats_tell_nothing(tmp_path: Path) -> None:
    result = moved_run(tmp_path, {(1, 1): [1], (1, 2): [8], (2, 1): [9], (2, 2): [5]})
    text = unequal_cost(result)
    assert text.startswith("Nothing that can be told from chance: too few repeats and decode sizes")
    assert "3.00 ms (1.03 times) more where P < D, 8.00 ms (1.08 times) more where P > D" in text
    assert told(result)["its 95% interval"] == ["too few units", "too few units"]
    assert told(result)["pairs (units)"] == ["3 (1)", "3 (1)"]


def test_other_settings_make_no_pairs(tmp_path: Path) -> None:
    """An equal pair of another block size, or of another decode size, is nothing to be held against."""
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for prefill, decode, block in ((1, 2, 16), (2, 2, 32), (1, 1, 16)):
        cell = cell_row(prefill, decode, ("BHLNC", "BHLNC"), cell_id=f"p{prefill}-d{decode}-{block}")
        cell.axes["prefill.block_size"] = block
        cell.axes["decode.backend"] = None if prefill == 1 else "triton"
        writer.write_cell(cell, [request_row(cell, 0, 60)], [transfer_row(cell, 0, 0)])
    writer.finish()
    result = load(tmp_path)
    assert unequal_cost(result).startswith("Cannot be said from this run")
    assert cost_table(result) == []


def test_ranks_that_begin_late_are_told_apart(tmp_path: Path) -> None:
    cells = [cell_row(p, 2, ("BHLNC", "BHLNC")) for p in (2, 1)]
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for cell, late in zip(cells, (0, 40), strict=True):
        moved = [transfer_row(cell, 0, 0), transfer_row(cell, 0, 1, begin_ns=(30 + late) * MS)]
        writer.write_cell(cell, [request_row(cell, 0, 60)], moved)
    writer.finish()
    result = load(tmp_path)
    assert [(row["ms"], row["rank_ms"]) for row in pair_rows(result)] == [(44.0, 4.0), (4.0, 4.0)]
    assert told(result)["slowest rank alone, ms (at P = D)"] == ["4.00 (4.00)"]
    assert told(result)["more, ms"] == ["+40.00"]
    assert "the slowest rank alone: 4.00 ms" in pair_grids(result)[0]["facts"][0]["rows"][0][1][0]["tip"]


def test_older_tables_are_told_for_what_they_are(tmp_path: Path) -> None:
    whole = write(tmp_path / "run")
    older = replace(
        whole, transfers=whole.transfers.assign(num_descriptors_merged=None, begin_ms=None, end_ms=None)
    )
    unequal, equal = pair_rows(older)
    # The slowest pair alone; the descriptors asked for.
    assert (unequal["ms"], unequal["descriptors"], unequal["is_span"]) == (16.0, 48.0, False)
    assert (equal["descriptors"], equal["is_merged"]) == (16.0, False)
    titles = [fact["title"] for fact in pair_grids(older)[0]["facts"]]
    assert titles[0] == "ms of its slowest pair of ranks (an older rayk wrote it)"
    assert titles[1] == "descriptors before merging (an older rayk wrote it)"
    assert told(older)["descriptors before merging (an older rayk wrote it) (at P = D)"] == ["48.0 (16.0)"]
    assert told(older)["ms of the slowest pair of ranks (an older rayk wrote it)"] == ["16.00"]
    assert not any("alone" in title for title in told(older))
    # Not even one row of a run may pass for merged where others are not.
    mixed = whole.transfers.copy()
    mixed.loc[0, "num_descriptors_merged"] = None
    assert [row["descriptors"] for row in pair_rows(replace(whole, transfers=mixed))] == [48.0, 16.0]


def test_what_vllm_does_not_tell_takes_nothing_from_what_rayk_tells(tmp_path: Path) -> None:
    rayks = write(tmp_path / "run")

    def with_vllms(name: str, **facts: object) -> pd.DataFrame:
        """A table of both, where the other kind's cells have names of their own."""
        table = getattr(rayks, name)
        return pd.concat(
            [table, table.assign(cell_id=table["cell_id"] + "-vllm", **facts)], ignore_index=True
        )

    both = replace(
        rayks,
        cells=pd.concat(
            [
                rayks.cells.assign(**{"engine.kind": "rayk"}),
                with_vllms("cells", **{"engine.kind": "vllm"}).iloc[len(rayks.cells) :],
            ],
            ignore_index=True,
        ),
        requests=with_vllms("requests"),
        transfers=with_vllms("transfers", num_descriptors_merged=None),
    )
    rows = pair_rows(both)
    told_of = {row["layouts"].endswith(", vLLM"): row["is_merged"] for row in rows}
    assert told_of == {False: True, True: False}
    assert [row for row in rows if row["is_merged"]] == pair_rows(rayks)
    assert told(both) == told(rayks)


def test_only_the_attempt_that_brought_the_kv_counts(tmp_path: Path) -> None:
    cell = cell_row(2, 1, ("BHLNC", "BHLNC"))
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    lost = transfer_row(cell, 0, 0, transfer_ns=500 * MS, verdict="TRANSFER_ERROR")
    half = transfer_row(cell, 0, 0, producer_rank=1, bytes=7_000_000)
    again = transfer_row(cell, 0, 0, retries=1, begin_ns=800 * MS)
    # Of the other request one rank's read ended well, and that was all.
    alone = [replace(row, request_id=f"{cell.cell_id}/0/1") for row in (lost, half)]
    rows = [request_row(cell, number, 55) for number in range(2)]
    writer.write_cell(cell, rows, [lost, half, again, *alone])
    writer.finish()
    [row] = pair_rows(load(tmp_path))
    assert (row["ms"], row["bytes"], row["num_requests"]) == (4.0, 2e6, 1)
