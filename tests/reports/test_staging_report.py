"""Reports say how transfers went, and what the other way would have cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rayk.reports import ResultWriter, load
from rayk.reports.report import markdown, write_html
from rayk.reports.staging import staging_records
from rayk.types.rows import TransferRow
from tests.reports.synthetic import SPEC, cell_row

ROW = TransferRow(
    cell_id="",
    repeat=0,
    request_id="r",
    producer_rank=0,
    consumer_rank=0,
    group=0,
    bytes=4096,
    num_descriptors=64,
    num_descriptors_merged=60,
    transfer_ns=3_000_000,
    direct_cost_us=2500.0,
    staged_cost_us=1500.0,
)


def written(directory: Path, rows: dict[str, list[TransferRow]]) -> Path:
    """A run with a cell of each of these settings, and an aggregated one."""
    writer = ResultWriter(directory, spec_yaml=SPEC, environment={})
    for i, (staging, its) in enumerate(rows.items()):
        cell = cell_row(1, i + 1, ("BHLNC", "LBHNC"))
        cell.axes["transfer.staging"] = staging
        writer.write_cell(cell, [], [replace(row, cell_id=cell.cell_id) for row in its])
    writer.write_cell(cell_row(1, None, ("BHLNC", "")), [], [])
    writer.finish()
    return directory


def test_the_way_taken_and_the_other_one(tmp_path: Path) -> None:
    staged = replace(ROW, staged=True, repack_ns=500_000, num_descriptors=4, num_descriptors_merged=1)
    run = written(tmp_path, {"never": [ROW, ROW], "auto": [staged, ROW], "always": [staged]})
    result = load(run)
    never, auto, always = staging_records(result.cells, result.transfers)
    assert [r["transfer.staging"] for r in (never, auto, always)] == ["never", "auto", "always"]
    assert [r["num_staged"] for r in (never, auto, always)] == [0, 1, 1]
    assert (never["chosen_ms"], never["other_ms"]) == pytest.approx((5.0, 3.0))
    assert (auto["chosen_ms"], auto["other_ms"]) == pytest.approx((4.0, 4.0))
    assert (always["chosen_ms"], always["other_ms"]) == pytest.approx((1.5, 2.5))
    assert (auto["num_descriptors"], auto["num_descriptors_merged"]) == (68, 61)
    assert (auto["took_ms"], auto["repack_ms"]) == pytest.approx((6.0, 0.5))
    text = markdown(result)
    assert "| p1-d3-BHLNC-LBHNC | always | 1 | 1 | 4 | 1 | 3.00 | 0.50 | 1.50 | 2.50 |" in text
    page = write_html(run).read_text()
    assert "<h2>Staging</h2>" in page
    assert ">1.50</td>" in page


def test_transfers_that_could_go_one_way_only_are_not_told(tmp_path: Path) -> None:
    result = load(written(tmp_path, {"auto": [replace(ROW, staged_cost_us=None)]}))
    assert staging_records(result.cells, result.transfers) == []
    assert "## Staging" not in markdown(result)
    assert "<h2>Staging</h2>" not in write_html(tmp_path).read_text()
