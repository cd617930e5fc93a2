"""Runs whose tables lack columns that were added since: they are read, reported and compared all the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rayk.reports import Result, ResultWriter, exit_code, load
from rayk.reports.columns import FIELDS
from rayk.reports.compare import compare_markdown, write_compare_html
from rayk.reports.differences import KEYS
from rayk.reports.files import TABLES
from rayk.reports.html import page_html
from rayk.reports.markdown import page_markdown
from rayk.reports.report import report_page
from rayk.reports.table_files import write_csv
from rayk.reports.verdicts import verdict_table
from tests.markers import one_per, sweep
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows

ENDS = [
    ("PASS", "PASS", True),
    ("NEAR_TIE", "PASS", True),
    ("UNSUPPORTED", "PASS", True),
    ("KV_MISMATCH", "PASS", False),
    ("KV_MISMATCH", "KV_MISMATCH", True),
    ("PASS", "KV_MISMATCH", False),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("older") / "whole"
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={})
    draw = random.Random(0)
    for tp, (verdict, expected, _) in enumerate(ENDS, start=1):
        cell = cell_row(1, tp, ("BHLNC", "LBHNC"), verdict=verdict, expected_verdict=expected, reason="why")
        writer.write_cell(cell, request_rows(cell, draw, 1), transfer_rows(cell, draw, 1))
    aggregated = cell_row(2, None, ("BHLNC", ""))
    writer.write_cell(aggregated, request_rows(aggregated, draw, 1), [])
    return load(folder)


@pytest.fixture(scope="module")
def older(whole: Result, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`older(table, *columns)`: the folder of the run without these columns of a table."""
    base = tmp_path_factory.mktemp("lacking")

    def make(table: str, *columns: str) -> Path:
        folder = base / f"{table}-{len(list(base.iterdir()))}"
        folder.mkdir()
        for name in TABLES:
            lacking = list(columns) if name == table else []
            getattr(whole, name).drop(columns=lacking).to_parquet(folder / f"{name}.parquet")
        return folder

    return make


@pytest.fixture(autouse=True)
def _no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its five megabytes, the same in every page, are not looked at here."""
    monkeypatch.setattr("rayk.reports.html.plotly_js", str)


def everything(result: Result) -> str:
    """All that `rayk report` can say of a run."""
    console = Console(width=400, quiet=True)
    console.print(verdict_table(result.cells))
    page = report_page(result)
    return page_html(page) + page_markdown(page)


def columns_that_may_lack() -> list[str]:
    axes = ["mode", "prefill.tp", "decode.tp", "prefill.layout", "decode.layout"]
    return [column for column in [*FIELDS["cells"], *axes] if column != "cell_id"]


@sweep(5)
@one_per()
@pytest.mark.parametrize("column", columns_that_may_lack())
def test_a_run_may_lack_any_column(column: str, older: Callable[..., Path], whole: Result) -> None:
    folder = older("cells", column)
    found = load(folder)
    if column in FIELDS["cells"]:
        assert found.cells[column].isna().all() or column in ("met", "expected_verdict")
        assert set(found.cells) == set(whole.cells)
    text = everything(found)
    assert all(text.count(cell) >= 2 for cell in whole.cells["cell_id"])


@one_per()
@pytest.mark.parametrize("table", TABLES)
def test_a_run_may_lack_all_columns_but_keys(table: str, older: Callable[..., Path], whole: Result) -> None:
    kept = {*KEYS[table], "verdict"}
    folder = older(table, *(column for column in FIELDS[table] if column not in kept))
    found = load(folder)
    assert set(getattr(found, table)) == set(getattr(whole, table))
    assert len(getattr(found, table)) == len(getattr(whole, table))
    assert "p1-d4-BHLNC-LBHNC" in everything(found)
    assert exit_code(found.cells) == 1
    assert len(write_csv(found, folder)) == len(TABLES)
    assert "| p1-d4-BHLNC-LBHNC |" in compare_markdown([whole, found])
    page = write_compare_html([found, whole], folder / "compare.html").read_text()
    assert '<span class="chip unmet">KV_MISMATCH</span>' in page


def test_whether_cells_were_met_follows_from_their_verdicts(
    older: Callable[..., Path], whole: Result
) -> None:
    assert whole.cells["met"].tolist() == [*(met for _, _, met in ENDS), True]
    assert load(older("cells", "met")).cells["met"].tolist() == whole.cells["met"].tolist()
    # Before faults could be planted, every cell was to pass.
    early = load(older("cells", "met", "expected_verdict")).cells
    assert early["met"].tolist() == [True, True, True, False, False, True, True]
