"""The tables, the page and the timeline of a predicted cell that hands over are those of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.reports import ResultWriter, load
from rayk.reports.timeline import write_timeline
from rayk.simulate import cell_arrivals, cell_row, prediction_facts, simulate_cell
from rayk.specs import Cell, dump_spec, load_spec
from tests.simulate.cells import MODEL, pair_book, pair_cell
from tests.specs.models import spec


def write(folder: Path, num: int = 12) -> Cell:
    cell = pair_cell(prefill={"num_engines": 2, "tp": 2}, decode={"num_engines": 2})
    book = pair_book(cell, spread=0.3)
    outcomes = [
        simulate_cell(
            cell,
            MODEL,
            cell_arrivals(
                cell,
                [tuple(range(i, i + 20 + i)) for i in range(num)],
                due_ns=[4_000_000 * i for i in range(num)],
            ),
            book,
            repeat=repeat,
            seed=5,
            noise=True,
        )
        for repeat in range(2)
    ]
    text = dump_spec(load_spec(spec(mode="disaggregated")).spec)
    writer = ResultWriter(folder, spec_yaml=text, environment=prediction_facts(book, outcomes))
    requests, transfers, steps = (
        [row for outcome in outcomes for row in getattr(outcome, name)]
        for name in ("requests", "transfers", "steps")
    )
    writer.write_cell(cell_row(cell, outcomes), requests, transfers, steps)
    writer.finish()
    writer.close()
    return cell


def test_the_page_and_the_timeline_open_predicted_hand_overs(tmp_path: Path) -> None:
    write(tmp_path)
    result = load(tmp_path)
    (row,) = result.cells.to_dict("records")
    assert (row["verdict"], row["num_requests"]) == ("PREDICTED", 24)
    stages = [name for name in result.requests if name.startswith("stage_")]
    total_ms = result.requests[stages].sum(axis=1) / 1e6
    assert total_ms.to_numpy() == pytest.approx(result.requests["e2e_ms"].to_numpy(), rel=1e-9)
    assert set(result.transfers["producer_rank"]) == {0, 1}
    assert (result.transfers["begin_ms"] < result.transfers["end_ms"]).all()
    timeline = write_timeline(result, tmp_path / "timeline.json")
    events = json.loads(timeline.read_text())["traceEvents"]
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert spans >= {"prefill", "ticket", "digest", "handover", "read", "fence", "verify", "decode"}
    (tmp_path / "report.html").unlink()
    found = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert found.exit_code == 0, found.output
    page = (tmp_path / "report.html").read_text()
    assert "PREDICTED, not measured" in page
    assert "take what the code says" not in page
