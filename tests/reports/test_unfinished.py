"""What reports say of a run of which some cells have not ended, and of what cannot be set side by side."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.reports import ResultWriter, load
from rayk.reports.answers import answers
from rayk.reports.report import markdown, write_html
from tests.reports.synthetic import SPEC, cell_row
from tests.reports.synthetic_load import write_bench


def run_of(folder: Path, verdicts: list[str], num_planned: int, reason: str = "") -> Path:
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={"cells": num_planned})
    for tp, verdict in zip((1, 2, 4), verdicts, strict=False):
        writer.write_cell(cell_row(1, tp, ("BHLNC", "BHLNC"), verdict=verdict, reason=reason), [], [])
    writer.finish()
    return folder


def test_cells_that_have_not_ended_are_no_pass(tmp_path: Path) -> None:
    result = load(run_of(tmp_path / "run", ["PASS", "PASS"], 20))
    answer = answers(result)[0]
    assert answer.text.startswith("Unfinished: 18 cells of 20 have not ended")
    assert "2 of 2 cells passed" in answer.text
    assert "--resume" in answer.text
    assert answer.tone == ""
    told = "2 of 2 PASS, unfinished: 18 of 20 cells are missing"
    assert markdown(result).startswith(f"# {told}")
    page = write_html(tmp_path / "run").read_text()
    assert f"<h1>{told}</h1>" in page


def test_a_failure_is_one_however_much_is_missing(tmp_path: Path) -> None:
    reason = "KV of r1 differs: layer 0, k, head 0, token 0: one flipped bit\nand more"
    answer = answers(load(run_of(tmp_path / "run", ["KV_MISMATCH"], 20, reason)))[0]
    assert answer.tone == "unmet"
    assert answer.text == (
        "No: KV of r1 differs: layer 0, k, head 0, token 0: one flipped bit. "
        "1 of 1 cell failed: p1-d1-BHLNC-BHLNC (KV_MISMATCH)."
    )


def test_a_whole_run_is_not_unfinished(tmp_path: Path) -> None:
    answer = answers(load(run_of(tmp_path / "run", ["PASS", "PASS"], 2)))[0]
    assert answer.text.startswith("Yes: 2 of 2")
    assert answer.tone == "met"


def test_a_run_and_a_bench_are_not_compared(tmp_path: Path) -> None:
    run, bench = run_of(tmp_path / "run", ["PASS"], 1), write_bench(tmp_path / "bench").directory
    done = CliRunner().invoke(app, ["report", str(run), str(bench)])
    assert done.exit_code == 2
    assert "not to be compared with a run" in done.output


def test_a_run_without_its_spec_promises_none(tmp_path: Path) -> None:
    run_of(tmp_path / "run", ["PASS"], 1)
    (tmp_path / "run/spec.yaml").unlink()
    answer = answers(load(tmp_path / "run"))[3]
    assert "no spec.yaml any more" in answer.text
    assert answer.command == ""
