"""Cells that divide tokens or layers in different ways are not averaged, paired or drawn as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from llmd_benchmark_report import BenchmarkReportV02

from rayk.reports import ResultWriter, load
from rayk.reports.divided import divided
from rayk.reports.export import cell_exports
from rayk.reports.grids import verdict_grids
from rayk.reports.llmd import llmd_yaml
from rayk.reports.loading import loading_rows
from rayk.reports.memory import OWN, memory_rows
from rayk.reports.paired import SIZES, changes
from rayk.reports.plots import num_workers, spread_plots, transfer_plots
from rayk.reports.result import Result
from rayk.reports.tp_cost import unequal_cost, unequal_pairs
from rayk.reports.tp_pairs import pair_grids, pair_rows
from rayk.types.rows import CellRow
from tests.reports.synthetic import MS, SPEC, cell_row
from tests.reports.test_report_numbers import request_row, transfer_row

LAYOUTS = ("BHLNC", "BHLNC")
WHOLE = {f"{side}.{leaf}": 1 for side in ("prefill", "decode") for leaf in ("pp", "dcp", "dcp_interleave")}


def divided_cell(prefill: int, decode: int, **changed: int) -> CellRow:
    """A cell whose axes differ from WHOLE as `changed` says: decode_dcp is decode.dcp."""
    axes = {key.replace("_", ".", 1): value for key, value in changed.items()}
    name = "-".join([f"p{prefill}-d{decode}", *(f"{key}={value}" for key, value in axes.items())])
    cell = cell_row(prefill, decode, LAYOUTS, cell_id=name)
    cell.axes |= WHOLE | axes
    return cell


def write(folder: Path, took: dict[tuple[tuple[int, int], tuple[tuple[str, int], ...]], int]) -> Result:
    """A cell per (TP sizes, what differs from WHOLE), whose two requests' KV moved in so many ms."""
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={"started": "2026-11-21T12:00:00+00:00"})
    for (sizes, changed), ms in took.items():
        cell = divided_cell(*sizes, **dict(changed))
        rows = [request_row(cell, number, 60) for number in range(2)]
        moved = [transfer_row(cell, number, 0, transfer_ns=ms * MS) for number in range(2)]
        writer.write_cell(cell, rows, moved)
    writer.finish()
    return load(folder)


DEALT = (("decode_dcp", 2),)
STAGED = (("prefill_pp", 2), ("decode_dcp", 2), ("decode_dcp_interleave", 4))
TOOK = {((2, 2), ()): 4, ((2, 2), DEALT): 8, ((2, 2), STAGED): 16, ((1, 2), ()): 6}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return write(tmp_path_factory.mktemp("divided"), TOOK)


def test_what_divides_kv_is_said_where_it_does() -> None:
    assert divided(divided_cell(2, 2).axes) == ""
    assert divided({"prefill.tp": 2, "decode.tp": 2}) == "", "an older run"
    assert divided(divided_cell(2, 2, **dict(STAGED)).axes) == "P PP 2, D DCP 2 by 4 tokens"
    layers = divided_cell(1, 1, prefill_pp=2).axes | {
        "prefill.pp_layers": "[3, 5]",
        "decode.pp": float("nan"),
    }
    assert divided(layers) == "P PP 2 (3 + 5 layers)"


def test_transfers_are_averaged_among_those_divided_alike(run: Result) -> None:
    rows = {(r["prefill_tp"], r["decode_tp"], r["layouts"]): r["ms"] for r in pair_rows(run)}
    assert rows == {
        (1, 2, "BHLNC → BHLNC"): 6.0,
        (2, 2, "BHLNC → BHLNC"): 4.0,
        (2, 2, "BHLNC → BHLNC, D DCP 2"): 8.0,
        (2, 2, "BHLNC → BHLNC, P PP 2, D DCP 2 by 4 tokens"): 16.0,
    }
    assert {grid["title"] for grid in pair_grids(run)} == {layouts for _, _, layouts in rows}


def test_unequal_tp_is_held_against_cells_that_differ_in_tp_alone(run: Result, tmp_path: Path) -> None:
    [pairs] = {(row.ms, row.ms_e) for row in unequal_pairs(run).itertuples()}
    assert pairs == (6.0, 4.0)
    alone = write(tmp_path, {((2, 2), DEALT): 8, ((1, 2), DEALT): 9})
    assert unequal_cost(alone).startswith("Cannot be said from this run: its sides divide tokens or layers")
    assert unequal_pairs(alone).empty


def test_grids_name_the_sizes_even_where_all_cells_agree(run: Result, tmp_path: Path) -> None:
    def titles(result: Result) -> list[str]:
        return [grid["title"] for grid in verdict_grids(result.cells)]

    assert len(titles(run)) == 3
    assert any("prefill.pp 2" in title and "decode.dcp 2" in title for title in titles(run))
    alone = write(tmp_path / "dealt", {((2, 2), DEALT): 8, ((1, 2), DEALT): 9})
    assert titles(alone) == ["BHLNC → BHLNC, decode.dcp 2"]
    assert titles(write(tmp_path / "whole", {((2, 2), ()): 8})) == ["BHLNC → BHLNC"]


def test_runs_are_compared_by_sizes_divided_alike(run: Result, tmp_path: Path) -> None:
    other = write(tmp_path, {key: 2 * ms for key, ms in TOOK.items()})
    found = {
        c.subject: c.base for c in changes(run, other) if (c.level, c.metric.name) == (SIZES, "transfer")
    }
    assert found == {
        "P 1, D 2": 6.0,
        "P 2, D 2": 4.0,
        "P 2, D 2: D DCP 2": 8.0,
        "P 2, D 2: P PP 2, D DCP 2 by 4 tokens": 16.0,
    }


def test_figures_have_a_curve_and_marks_per_pair_of_sizes(run: Result) -> None:
    names = ["P 1, D 2", "P 2 PP 2, D 2 DCP 2 by 4 tokens", "P 2, D 2", "P 2, D 2 DCP 2"]
    assert [trace["name"] for trace in spread_plots(run)[0].data] == names
    [plot] = transfer_plots(run)
    assert [trace["name"] for trace in plot.data] == names
    assert len({(t["marker"]["color"], t["marker"]["symbol"]) for t in plot.data}) == len(names)


def test_workers_of_all_stages_count(run: Result) -> None:
    assert num_workers(divided_cell(2, 2, prefill_pp=3, decode_dcp=2).axes) == 2 * 3 + 2
    [staged] = [cell for cell in cell_exports(run) if cell.setting("prefill.pp") == 2]
    report: Any = BenchmarkReportV02.model_validate(yaml.safe_load(llmd_yaml(staged)))
    engines = {c.metadata.label: c.standardized.accelerator for c in report.scenario.stack}
    assert (engines["prefill"].parallelism.pp, engines["prefill"].count) == (2, 4)
    assert (engines["decode"].parallelism.pp, engines["decode"].count) == (1, 2)


def test_memory_and_weights_are_told_apart(tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict.fromkeys(
        ("used_bytes", "padding_bytes", "wasted_bytes", "replicated_bytes"), 2**20
    )
    held: dict[str, Any] = {"kind": "full", "num_layers": 2, "block_size": 16, "num_requests": 1, **sizes}
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for changed in ((), DEALT, STAGED):
        cell = divided_cell(2, 2, **dict(changed))
        cell.kv_held = {"prefill": [dict(held)], "decode": [dict(held)]}
        cell.load_memory = {side: [{"weight_bytes": 5, "max_read_bytes": 3}] for side in cell.kv_held}
        writer.write_cell(cell, [], [])
    writer.finish()
    result = load(tmp_path)
    told = [(r["side"], r["divided"], r["num_cells"]) for r in memory_rows(result) if r["what"] == OWN]
    expected = [
        ("prefill", "", 2),
        ("prefill", "PP 2", 1),
        ("decode", "", 1),
        ("decode", "DCP 2", 1),
        ("decode", "DCP 2 by 4 tokens", 1),
    ]
    assert told == expected
    assert sorted((r["side"], r["divided"], r["num_cells"]) for r in loading_rows(result)) == sorted(expected)
    page = (tmp_path / "report.html").read_text()
    assert "divided by" in page
    plain = ResultWriter(tmp_path / "plain", spec_yaml=SPEC, environment={})
    cell = divided_cell(2, 2)
    cell.kv_held = {"prefill": [dict(held)], "decode": [dict(held)]}
    plain.write_cell(cell, [], [])
    assert "divided by" not in plain.finish().read_text()
