"""Rates that stand in one grid have one unit, so that they can be compared by eye."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayk.reports import Result, ResultWriter, load
from rayk.reports.grids import verdict_grids
from rayk.reports.tp_pairs import pair_grids
from tests.reports.synthetic import MS, SPEC, cell_row
from tests.reports.test_report_numbers import request_row, transfer_row


def run_of(folder: Path, took_ms: dict[int, int]) -> Result:
    """Per decode TP a request whose 2 MB took so many ms; and one cell that moved nothing."""
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={})
    for decode, ms in took_ms.items():
        cell = cell_row(1, decode, ("BHLNC", "BHLNC"))
        writer.write_cell(cell, [request_row(cell, 0, 60)], [transfer_row(cell, 0, 0, transfer_ns=ms * MS)])
    writer.write_cell(cell_row(1, 8, ("BHLNC", "BHLNC")), [], [])
    writer.finish()
    return load(folder)


@pytest.mark.parametrize(
    ("took_ms", "expected"),
    [
        ({1: 1, 2: 40}, ["2,000.0 MB/s", "50.0 MB/s"]),
        ({1: 1, 2: 20}, ["2.00 GB/s", "0.10 GB/s"]),
        ({1: 100, 2: 40}, ["20.0 MB/s", "50.0 MB/s"]),
    ],
    ids=str,
)
def test_a_grid_has_rates_of_one_unit(tmp_path: Path, took_ms: dict[int, int], expected: list[str]) -> None:
    result = run_of(tmp_path, took_ms)
    [grid] = verdict_grids(result.cells)
    [(_, cells)] = grid["rows"]
    assert [cell["note"] for cell in cells] == [*expected, ""]
    [pairs] = pair_grids(result)
    rates = pairs["facts"][3]["rows"][0][1]
    assert [cell["text"] for cell in rates] == expected
