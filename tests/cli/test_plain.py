"""Tables where there is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayk.cli.plain import plain_lines, print_table
from rayk.reports import load, verdict_table
from rayk.reports.load_page import load_tables
from rayk.reports.plan_text import plan_tables
from tests.reports.synthetic import write_run
from tests.reports.synthetic_plan import synthetic_facts, synthetic_plans
from tests.reports.test_columns import write_load


@pytest.fixture
def table() -> Table:
    made = Table(title="two rows")
    made.add_column("cell")
    made.add_column("bytes", justify="right")
    made.add_column("reason")
    made.add_row(Text("a", style="red"), "12", "[bold]why\nnot[/bold]")
    made.add_row("longer", "1,234", Text("[bold] as it is"))
    return made


def test_a_row_is_a_line_and_columns_stand_below_each_other(table: Table) -> None:
    assert plain_lines(table) == [
        "two rows",
        "cell    bytes  reason",
        "a          12  why not",
        "longer  1,234  [bold] as it is",
    ]


def test_a_terminal_gets_the_table_and_a_pipe_the_lines(table: Table) -> None:
    shown = {}
    for is_terminal in (True, False):
        out = io.StringIO()
        print_table(Console(file=out, force_terminal=is_terminal, width=20), table)
        shown[is_terminal] = out.getvalue()
    assert shown[False].splitlines() == plain_lines(table)  # wider than the console, and not cut
    assert "\x1b[" in shown[True]
    assert "\x1b" not in shown[False]


def test_every_cell_of_a_run_is_one_line_with_its_whole_reason(tmp_path: Path) -> None:
    cells = load(write_run(tmp_path / "run").parent).cells
    title, heads, *rows = plain_lines(verdict_table(cells))
    assert title == "15 of 18 PASS, 1 NEAR_TIE, 1 TOKEN_MISMATCH, 1 KV_MISMATCH"
    assert heads.split()[:2] == ["cell_id", "verdict"]
    assert [row.split()[:2] for row in rows] == cells[["cell_id", "verdict"]].to_numpy().tolist()
    assert all(reason in row for row, reason in zip(rows, cells["reason"], strict=True))


def test_a_loads_tables_too(tmp_path: Path) -> None:
    for table in load_tables(load(write_load(tmp_path / "load")).cells):
        assert any(line.startswith("poisson rate=100") for line in plain_lines(table))


def test_every_plan_is_one_line_with_all_that_speaks_against_it() -> None:
    plans = synthetic_plans()
    *_, tried = plan_tables(plans, synthetic_facts())
    _, _, *rows = plain_lines(tried)
    assert len(rows) == len(plans)
    assert all(reason in row for row, reason in zip(rows, plans["why_not"], strict=True))
