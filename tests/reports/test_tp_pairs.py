"""What pairs of tensor-parallel sizes cost, of rows made by hand: what is compared, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rayk.reports import ResultWriter, load
from rayk.reports.tp_pairs import pair_grids, pair_rows, unequal_cost
from tests.reports.synthetic import MS, SPEC, cell_row
from tests.reports.test_report_numbers import request_row, transfer_row, write


@pytest.mark.parametrize(
    ("longer_ms", "told"),
    [
        ([4, 5, 6, 7, 8, 9, 10, 11], "interval +4.00 to +11.00 ms), 7.1% of the median request's 105 ms."),
        ([-4, 5, -6, 7, -3, 9, -3, 11], "That may be chance."),
        ([4, 5, 6, 7, 8], "(medians of 5 pairs of sizes and repeats): too few to tell that from chance."),
    ],
)
def test_unequal_sizes_cost_what_the_same_prompts_tell(
    tmp_path: Path, longer_ms: list[int], told: str
) -> None:
    """A repeat is seen once: its prompts are longer by the same."""
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    equal, unequal = (cell_row(1, d, ("BHLNC", "BHLNC")) for d in (1, 2))
    for cell, prompts in ((equal, (0, 1, 2, 7)), (unequal, (0, 1, 2, 8))):
        rows, transfers = [], []
        for repeat, longer in enumerate(longer_ms):
            for number in prompts:
                # A prompt takes 100 ms longer than the one before; some moved at one of the sizes only.
                took = 1 if number > 2 else 100 * (1 + number) + longer * (cell is unequal)
                row, moved = (
                    request_row(cell, number, 60),
                    transfer_row(cell, number, 0, transfer_ns=took * MS),
                )
                row.repeat = moved.repeat = repeat
                rows.append(row)
                transfers.append(moved)
        writer.write_cell(cell, rows, transfers)
    writer.finish()
    text = unequal_cost(load(tmp_path))
    assert told in text
    assert ("too few" in text) == (len(longer_ms) < 6)
    assert "moved 1.9 MiB, at equal ones 1.9 MiB" in text


def test_unequal_sizes_are_held_against_those_of_their_sides(tmp_path: Path) -> None:
    """P 1 to D 2 against P 1 to D 1 and P 2 to D 2, not against P 4 to D 4."""
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    took = {(1, 1): 10, (2, 2): 20, (4, 4): 900, (1, 2): 17, (2, 1): 14, (1, 4): 1000, (4, 1): 454}
    took |= {(2, 4): 462, (4, 2): 463}
    for (prefill, decode), ms in took.items():
        cell = cell_row(prefill, decode, ("BHLNC", "BHLNC"))
        rows = [request_row(cell, number, 60) for number in range(3)]
        moved = [transfer_row(cell, n, 0, transfer_ns=(ms + 100 * n) * MS) for n in range(3)]
        writer.write_cell(cell, rows, moved)
    writer.finish()
    # By -1, -1, 2, 2, 3 and 545 more than the mean of both sides' sizes, of each prompt.
    text = unequal_cost(load(tmp_path))
    assert "took 2.00 ms more at unequal TP sizes" in text
    assert "medians of 6 pairs" in text
    assert "95% interval -1.00 to +545.00 ms" in text
    assert "That may be chance." in text


def test_ranks_that_begin_late_are_told_apart(tmp_path: Path) -> None:
    cells = [cell_row(1, d, ("BHLNC", "BHLNC")) for d in (1, 2)]
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for cell, late in zip(cells, (0, 40), strict=True):
        moved = [transfer_row(cell, 0, 0), transfer_row(cell, 0, 1, begin_ns=(30 + late) * MS)]
        writer.write_cell(cell, [request_row(cell, 0, 60)], moved)
    writer.finish()
    result = load(tmp_path)
    assert [(row["ms"], row["rank_ms"]) for row in pair_rows(result)] == [(4.0, 4.0), (44.0, 4.0)]
    assert "The slowest rank alone took 4.00 ms, at equal ones 4.00 ms" in unequal_cost(result)
    assert "the slowest rank alone: 4.00 ms" in pair_grids(result)[0]["facts"][0]["rows"][0][1][1]["tip"]


def test_older_tables_are_told_for_what_they_are(tmp_path: Path) -> None:
    whole = write(tmp_path / "run")
    older = replace(
        whole, transfers=whole.transfers.assign(num_descriptors_merged=None, begin_ms=None, end_ms=None)
    )
    equal, unequal = pair_rows(older)
    # The slowest pair alone; the descriptors asked for.
    assert (unequal["ms"], unequal["descriptors"], unequal["is_span"]) == (16.0, 48.0, False)
    assert (equal["descriptors"], equal["is_merged"]) == (16.0, False)
    titles = [fact["title"] for fact in pair_grids(older)[0]["facts"]]
    assert titles[0] == "ms of its slowest pair of ranks (an older rayk wrote it)"
    assert titles[1] == "descriptors before merging (an older rayk wrote it)"
    text = unequal_cost(older)
    assert "48.0 descriptors before merging (an older rayk wrote it), at equal ones 16.0" in text
    assert "Times are those of the slowest pair of ranks" in text
    # Not even one row of a run may pass for merged where others are not.
    mixed = whole.transfers.copy()
    mixed.loc[0, "num_descriptors_merged"] = None
    assert [row["descriptors"] for row in pair_rows(replace(whole, transfers=mixed))] == [16.0, 48.0]


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
