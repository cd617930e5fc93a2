"""A run of many cells: each costs what one costs, none is lost, and its report can be made."""

from __future__ import annotations

import random
from pathlib import Path

import pandas as pd
import pytest

from rayk.reports import ResultWriter, load
from rayk.reports.intervals import median_interval
from rayk.reports.pending import FILE, read_pending
from rayk.reports.report import markdown, write_html
from rayk.types.errors import UserError
from tests.markers import thorough
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows


def open_writer(folder: Path, *, resume: bool = False) -> ResultWriter:
    return ResultWriter(folder, spec_yaml=SPEC, environment={}, resume=resume)


def write_cells(writer: ResultWriter, numbers: range, num_requests: int = 1) -> None:
    for number in numbers:
        cell = cell_row(1 + number % 4, 2, ("BHLNC", "LBHNC"), cell_id=f"c{number}")
        cell.axes["seed"] = number
        draw = random.Random(number)
        requests = request_rows(cell, draw, num_requests)
        writer.write_cell(cell, requests, transfer_rows(cell, draw, num_requests))


def written_bytes() -> int:
    """By this process so far, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def cost(folder: Path, num_cells: int) -> int:
    before = written_bytes()
    write_cells(open_writer(folder), range(num_cells))
    return written_bytes() - before


@thorough
def test_four_times_as_many_cells_write_four_times_as_much(tmp_path: Path) -> None:
    few, many = cost(tmp_path / "few", 60), cost(tmp_path / "many", 240)
    # Writing the tables anew for every cell wrote nine times as much; where an eighth falls matters a little.
    assert many < 5.5 * few


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_cells_cost_what_two_thousand_cells_cost(tmp_path: Path) -> None:
    few, many = cost(tmp_path / "few", 500), cost(tmp_path / "many", 2000)
    assert many < 5 * few
    assert len(load(tmp_path / "many").cells) == 2000


@thorough
def test_all_cells_are_read_while_tables_lack_some(tmp_path: Path) -> None:
    """What a killed run leaves: everything is shown, and a resumed run has it."""
    write_cells(open_writer(tmp_path), range(31), 2)
    in_tables = len(pd.read_parquet(tmp_path / "cells.parquet"))
    waiting = [cell.cell_id for cell in read_pending(tmp_path)]
    assert 31 - 31 // 8 <= in_tables < 31
    assert waiting == [f"c{number}" for number in range(in_tables, 31)]
    killed = load(tmp_path)
    assert "31 of 31 PASS" in write_html(tmp_path).read_text()
    assert markdown(killed).count("\n| c30 |") > 0

    again = open_writer(tmp_path, resume=True)
    assert list(again.finished) == [f"c{number}" for number in range(31)]
    assert not (tmp_path / FILE).exists()
    whole = load(tmp_path)
    for name in ("cells", "requests", "transfers"):
        pd.testing.assert_frame_equal(getattr(whole, name), getattr(killed, name))
    one = tmp_path / "one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayk.reports.writer.PART", 10**9)  # tables after every cell
        write_cells(open_writer(one), range(31), 2)
    for name in ("cells", "requests", "transfers"):
        pd.testing.assert_frame_equal(getattr(whole, name), getattr(load(one), name))


def test_a_torn_last_line_is_the_cell_in_flight_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    write_cells(open_writer(tmp_path), range(28))
    path = tmp_path / FILE
    whole = path.read_bytes()
    num_waiting = whole.count(b"\n")
    assert num_waiting == 2
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (last, last + 1, last + 9, len(whole) // 2 + last // 2, len(whole) - 2):
        path.write_bytes(whole[:end])
        assert len(load(tmp_path).cells) == 27, "all but the cell whose line is torn"
    path.write_bytes(whole.replace(b'"cells"', b'"cello"', 1))
    with pytest.raises(UserError, match=r"cells\.pending: line 1 is damaged"):
        load(tmp_path)
    path.write_bytes(whole[: last + 9])
    again = open_writer(tmp_path, resume=True)
    assert len(again.finished) == 27
    write_cells(again, range(27, 28))
    assert len(load(tmp_path).cells) == 28


def test_a_full_disk_takes_back_what_it_took_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(tmp_path)
    write_cells(writer, range(27))
    before = (tmp_path / FILE).read_bytes()

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rayk.reports.pending.os.fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            write_cells(writer, range(27, 28))
    assert (tmp_path / FILE).read_bytes() == before


def test_thousands_of_requests_have_an_interval() -> None:
    low, high = median_interval(list(range(100_000)), 0.95) or (0, 0)
    # 1.96 standard deviations of a binomial, sqrt(n) / 2, on each side.
    assert (low, high) == (pytest.approx(50_000 - 310, abs=3), pytest.approx(50_000 + 310, abs=3))
