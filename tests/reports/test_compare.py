"""Comparing runs: what is found, and how it reads."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rayk.reports import Result, ResultWriter, load
from rayk.reports.compare import (
    compare,
    compare_headline,
    compare_markdown,
    sections,
    write_compare_csv,
    write_compare_html,
)
from rayk.reports.differences import differences_of
from rayk.types.rows import CellRow
from tests.reports.synthetic import MS, cell_row, request_rows, transfer_rows

SPEC = "name: n\nmodel: m\nsampling: {max_tokens: 24, temperature: 0.0}\nmatrix: [{prefill.tp: [1, 2]}]\n"
FACTS = {"git_commit": "c" * 40, "packages": {"torch": "2.13", "ray": "2.60"}, "devices": {"cpu": "x"}}


def write(
    folder: Path, cells: list[CellRow], *, slower: float = 1.0, spec: str = SPEC, facts: Any = FACTS
) -> Result:
    """A run whose cells' rows are drawn from a seed of their own; all times are multiplied by `slower`."""
    writer = ResultWriter(folder, spec_yaml=spec, environment=facts)
    for cell in cells:
        draw = random.Random(cell.cell_id)
        requests, transfers = request_rows(cell, draw), transfer_rows(cell, draw)
        for row in requests:
            row.token_times_ns = [
                row.arrival_ns + int((t - row.arrival_ns) * slower) for t in row.token_times_ns
            ]
        for moved in transfers:
            moved.transfer_ns = int(moved.transfer_ns * slower)
        writer.write_cell(cell, requests, transfers)
    return load(folder)


def pair(decode: int, **changes: Any) -> CellRow:
    return cell_row(1, decode, ("BHLNC", "LBHNC"), **changes)


BROKEN = {"verdict": "TOKEN_MISMATCH", "reason": "prompt 2: token 7 | 311", "num_token_mismatches": 1}


@pytest.fixture
def runs(tmp_path: Path) -> list[Result]:
    """Three runs: the base, a slower one with a broken cell, one with other cells, spec and torch."""
    base = write(tmp_path / "monday", [pair(1), pair(2), pair(4)])
    slow = write(tmp_path / "tuesday", [pair(1), pair(2, **BROKEN), pair(4)], slower=2.0)
    other = write(
        tmp_path / "wednesday",
        [pair(4), pair(8)],
        spec=SPEC.replace("24", "8"),
        facts=FACTS | {"packages": {"torch": "2.14", "ray": "2.60"}},
    )
    return [base, slow, other]


def test_ratios_are_to_the_first_run(runs: list[Result], tmp_path: Path) -> None:
    table = compare(runs).set_index("cell_id")
    name = pair(1).cell_id
    assert table.loc[name, "ttft_ms_p50/tuesday/ratio"] == pytest.approx(2, rel=1e-3)
    assert table.loc[name, "transfer_gb_per_s/tuesday/ratio"] == pytest.approx(0.5, rel=1e-3)
    assert "ttft_ms_p50/monday/ratio" not in table
    assert math.isnan(table.loc[name, "ttft_ms_p50/wednesday/ratio"])
    assert table.loc[pair(4).cell_id, "tpot_ms_p50/wednesday/ratio"] == 1
    assert table["missing"].tolist() == [True, True, False, True]
    read = pd.read_csv(write_compare_csv(runs, tmp_path / "c.csv"))
    assert read["changed"].tolist() == [False, True, False, False]
    assert read["ttft_ms_p50/tuesday/ratio"].tolist()[:3] == pytest.approx([2, 2, 2], rel=1e-3)
    two = compare(runs[:2])
    assert two.loc[two["changed"], "cell_id"].tolist() == [pair(2).cell_id]


def test_a_time_of_zero_has_no_ratio(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, [pair(1, wall_ns=wall)]) for name, wall in (("a", 0), ("b", 5 * MS))]
    assert compare(runs)["wall_s/b/ratio"].isna().all()


def test_sections_name_what_changed_and_what_is_missing(runs: list[Result]) -> None:
    changed, *paired, times = sections(runs[:2])
    assert [s.title for s in paired] == ["Paired differences", "Transfers by TP sizes", "Cells that changed"]
    assert changed.title == "Changed verdicts"
    assert changed.rows == [[pair(2).cell_id, "PASS", "TOKEN_MISMATCH", "prompt 2: token 7 | 311"]]
    rows = {row[0]: row[1:] for row in times.rows}
    assert rows["TTFT ms"][0].startswith("2.00 (2.00 to 2.00)")
    assert rows["wall s"] == ["1.00 (1.00 to 1.00)", "3"]
    absent = next(s for s in sections(runs) if s.title == "Cells of some runs only")
    assert [row[0] for row in absent.rows] == [pair(d).cell_id for d in (1, 2, 8)]
    assert absent.rows[2][1:] == ["absent", "absent", "PASS"]
    assert sections([runs[0], runs[0]])[0].title == "Times over all cells", "nothing else stands out"


def test_runs_say_how_they_differ_from_the_first(runs: list[Result]) -> None:
    text = compare_markdown(runs)
    assert text.startswith("# 1 of 4 cells differs in verdict, 3 in some runs only")
    tuesday = text[text.index("- tuesday") : text.index("- wednesday")]
    assert "another spec" not in tuesday
    assert "cells.verdict: 1 row, first" in tuesday
    wednesday = text[text.index("- wednesday") :].partition("##")[0]
    assert "another spec: sampling.max_tokens (24, now 8)" in wednesday
    assert "other versions or another machine: packages.torch ('2.13', now '2.14')" in wednesday
    assert "equal tables in the cells both have, times and nodes aside" in wednesday
    assert "token 7 \\| 311" in text, "a pipe in a reason does not end its column"


def test_the_page_has_every_section(runs: list[Result], tmp_path: Path) -> None:
    page = write_compare_html(runs, tmp_path / "c.html").read_text()
    for text in (
        "<h2>Changed verdicts</h2>",
        "<h2>Cells of some runs only</h2>",
        "<h2>Times over all cells</h2>",
        '<span class="chip unmet">TOKEN_MISMATCH</span>',
        "sampling.max_tokens (24, now 8)",
    ):
        assert text in page
    assert not re.search(r'(?:src|href)="http', page)


def test_chips_say_whether_a_verdict_was_expected(tmp_path: Path) -> None:
    """A fault that was found is good news in either run; a verdict that nobody expected is not."""
    wrong = {"verdict": "KV_MISMATCH", "expected_verdict": "KV_MISMATCH"}
    left = write(tmp_path / "a", [pair(1, **wrong), pair(2, **wrong), pair(4, verdict="UNSUPPORTED")])
    right = write(tmp_path / "b", [pair(1, **wrong), pair(2, **wrong | {"verdict": "PASS"})])
    changed, absent, *_ = sections([left, right])
    assert changed.chips == [["met", "unmet"]]
    assert absent.chips == [["UNSUPPORTED", ""]]
    page = write_compare_html([left, right], tmp_path / "c.html").read_text()
    chips = re.findall(r'<span class="chip (\w+)">(\w+)', page)
    found = ("met", "KV_MISMATCH")
    assert chips == [
        *(found, ("unmet", "PASS")),
        ("UNSUPPORTED", "UNSUPPORTED"),
        *(found, found, found, ("unmet", "PASS")),
        ("UNSUPPORTED", "UNSUPPORTED"),
    ]


def test_equal_runs_are_said_to_be_equal(tmp_path: Path) -> None:
    cells = [pair(1), pair(2)]
    runs = [write(tmp_path / "a", cells), write(tmp_path / "b", cells, slower=3.0)]
    assert compare_headline(runs) == "2 cells in every run, equal verdicts"
    assert differences_of(*runs) == []
    assert "equal tables in the cells both have, times and nodes aside" in compare_markdown(runs)


def test_one_cell_is_no_cells_and_metrics_that_no_run_has_are_left_out(tmp_path: Path) -> None:
    alone = cell_row(1, None, ("BHLNC", "BHLNC"))
    runs = [write(tmp_path / name, [alone]) for name in ("a", "b")]
    assert compare_headline(runs) == "1 cell in every run, equal verdicts"
    text = compare_markdown(runs)
    assert "| TTFT ms, a | TTFT ms, b |" in text
    assert "GB/s" not in text, "nothing was handed over"
    moved = [write(tmp_path / name, [alone, pair(1)]) for name in ("c", "d")]
    assert "| GB/s, c | GB/s, d |" in compare_markdown(moved)


def change(result: Result, table: str, column: str, value: Any, row: int = 0) -> Result:
    """The result with one value replaced."""
    tables = {name: getattr(result, name).copy() for name in ("cells", "requests", "transfers")}
    values = list(tables[table][column])
    values[row] = value
    tables[table][column] = pd.Series(values, dtype=object)
    return Result(**tables)


@pytest.mark.parametrize(
    ("table", "column", "value", "expected"),
    [
        ("cells", "verdict", "TIMEOUT", "cells.verdict: 1 row, first p1-d1-BHLNC-LBHNC: PASS and TIMEOUT"),
        ("cells", "num_kv_bytes_checked", 7, "cells.num_kv_bytes_checked: 1 row"),
        ("cells", "checks_done", ["tokens"], "cells.checks_done: 1 row"),
        ("requests", "output_token_ids", [1, 2], "requests.output_token_ids: 1 row"),
        ("requests", "error", "lost", "requests.error: 1 row"),
        ("requests", "prompt_index", 99, "rows of requests in one run only: 2 rows"),
        ("transfers", "bytes", 1, "transfers.bytes: 1 row"),
        ("transfers", "verdict", "LOST", "transfers.verdict: 1 row"),
    ],
)
def test_every_value_but_times_counts(
    tmp_path: Path, table: str, column: str, value: Any, expected: str
) -> None:
    base = write(tmp_path / "a", [pair(1), pair(2)])
    found = [str(d) for d in differences_of(base, change(base, table, column, value))]
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_output_tokens_come_first(tmp_path: Path) -> None:
    base = write(tmp_path / "a", [pair(1)])
    other = change(change(base, "cells", "verdict", "TIMEOUT"), "requests", "output_token_ids", [1, 2])
    assert [d.column for d in differences_of(base, other)] == ["output_token_ids", "verdict"]


def test_runs_without_a_common_cell_are_not_called_equal(tmp_path: Path) -> None:
    runs = [write(tmp_path / "a", [pair(1)]), write(tmp_path / "b", [pair(2)])]
    assert compare_headline(runs) == "no cell is in every run, 2 in some runs only"


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("cells", "wall_s"),
        ("cells", "decode.node"),
        ("requests", "itl_ms"),
        ("requests", "stage_queue_ns"),
        ("transfers", "gb_per_s"),
    ],
)
def test_times_do_not_count(tmp_path: Path, table: str, column: str) -> None:
    base = write(tmp_path / "a", [pair(1)])
    assert differences_of(base, change(base, table, column, None)) == []


def test_rows_are_compared_by_name_not_by_place(tmp_path: Path) -> None:
    base = write(tmp_path / "a", [pair(1), pair(2)])
    shuffled = Result(
        cells=base.cells.iloc[::-1],
        requests=base.requests.sample(frac=1, random_state=0),
        transfers=base.transfers.sample(frac=1, random_state=0),
    )
    assert differences_of(base, shuffled) == []
    fewer = Result(cells=base.cells, requests=base.requests.iloc[1:], transfers=base.transfers)
    assert [str(d) for d in differences_of(base, fewer)] == [
        "rows of requests in one run only: 1 row, first p1-d1-BHLNC-LBHNC/0/0"
    ]
