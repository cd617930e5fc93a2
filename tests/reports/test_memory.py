"""Where KV memory goes: what requests held, and why more was moved than compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rayk.reports import ResultWriter, load
from rayk.reports.loading import loading_rows
from rayk.reports.memory import OWN, memory_rows, moved_text
from rayk.reports.report import markdown
from tests.reports.synthetic import SPEC, cell_row
from tests.reports.test_report_numbers import request_row, transfer_row

MIB = 2**20


def test_memory_is_told_by_group_once_for_cells_that_are_alike(tmp_path: Path) -> None:
    def group(kind: str, used: int, padding: int, wasted: int) -> dict[str, str | int]:
        sizes = {"used_bytes": used * 2**20, "padding_bytes": padding * 2**20, "wasted_bytes": wasted * 2**20}
        return {"kind": kind, "num_layers": 2, "block_size": 16, **sizes}

    both = [group("full", 6, 0, 0), group("sliding", 2, 1, 5)]
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for tp in (1, 2):
        groups = {"prefill": both, "decode": both[:tp]}
        writer.write_cell(cell_row(1, tp, ("BHLNC", "BHLNC"), kv_groups=groups), [], [])
    writer.write_cell(cell_row(1, 4, ("BHLNC", "BHLNC")), [], [])
    page = writer.finish().read_text()
    told = [
        (r["side"], r["group"], r["kind"], r["used_percent"], r["num_cells"])
        for r in memory_rows(load(tmp_path))
    ]
    assert told == [
        ("prefill", 0, "full", 100.0, 2),
        ("prefill", 1, "sliding", 25.0, 2),
        ("decode", 0, "full", 100.0, 1),
        ("decode", 0, "full", 100.0, 1),
        ("decode", 1, "sliding", 25.0, 1),
    ]
    table = page[page.index("<h2>Where KV memory goes") :]
    row = next(r for r in table.split("<tr>") if ">sliding<" in r)
    assert "An older rayk wrote this run" in table
    assert re.findall(r">([^<]+)</td>", row) == [
        "reference request",
        "prefill",
        "1",
        "sliding",
        "2",
        "16",
        "2",
        "1",
        "5",
        "25.0",
        "2",
    ]


def group_row(used: int, wasted: int, replicated: int, num_requests: int) -> dict[str, str | int]:
    sizes = {"used_bytes": used * MIB, "padding_bytes": 0, "wasted_bytes": wasted * MIB}
    counts = {"num_layers": 2, "block_size": 16, "num_requests": num_requests}
    return {"kind": "full", **counts, **sizes, "replicated_bytes": replicated * MIB}


def test_own_requests_are_told_by_tp_size(tmp_path: Path) -> None:
    """Cells of one size share a row, by the number of their requests."""
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    reference: dict[str, Any] = {"kind": "full", "num_layers": 2, "block_size": 16}
    reference |= {"used_bytes": 8 * MIB, "padding_bytes": 0, "wasted_bytes": 0}
    for number, (tp, of_cell) in enumerate(
        ((1, group_row(3, 1, 0, 1)), (1, group_row(21, 3, 0, 3)), (4, group_row(2, 2, 4, 2)))
    ):
        cell = cell_row(tp, 1, ("BHLNC", "BHLNC"), cell_id=str(number), kv_held={"prefill": [of_cell]})
        cell.kv_groups = {"prefill": [reference]}
        writer.write_cell(cell, [], [])
    page = writer.finish().read_text()
    rows = memory_rows(load(tmp_path))
    names = ("used_bytes", "wasted_bytes", "replicated_bytes")
    told = [(r["tp"], r["num_cells"], *(r[name] / MIB for name in names)) for r in rows if r["what"] == OWN]
    assert told == [(1, 2, 6.0, 1.0, 0.0), (4, 1, 1.0, 1.0, 2.0)]
    assert [r["used_percent"] for r in rows] == [pytest.approx(100 * 6 / 7), 50.0, 100.0]
    table = page[page.index("<h2>Where KV memory goes") : page.index("<h2>Cells")]
    assert "An older rayk" not in table
    assert table.count(">own requests, mean</td>") == 2
    assert table.count(">reference request</td>") == 1


def test_what_moved_beside_the_rows_of_tokens_is_told(tmp_path: Path) -> None:
    cell = cell_row(1, 2, ("BHLNC", "BHLNC"), num_kv_bytes_checked=3 * MIB)
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    moved = [
        transfer_row(cell, 0, 0, bytes=4 * MIB),
        transfer_row(cell, 1, 0, bytes=MIB // 2, verdict="TRANSFER_ERROR"),
    ]
    writer.write_cell(cell, [request_row(cell, 0, 60)], moved)
    page = writer.finish().read_text()
    result = load(tmp_path)
    assert moved_text(result).startswith(
        "Of 4.5 MiB of KV moved, 3 MiB were rows of tokens, which digests compare; 1 MiB were other rows"
    )
    assert ", 512 KiB by attempts that failed" in moved_text(result)
    assert "1 MiB were other rows" in page
    assert "1 MiB were other rows" in markdown(result)
    result.cells["num_kv_bytes_checked"] = 9 * MIB
    assert moved_text(result) == ""


def test_markdown_has_what_the_first_cards_say(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={"git_commit": "c" * 40})
    for prefill in (1, 2):
        cell = cell_row(prefill, 2, ("BHLNC", "BHLNC"))
        writer.write_cell(cell, [request_row(cell, 0, 55)], [transfer_row(cell, 0, 0)])
    writer.finish()
    lines = markdown(load(tmp_path)).splitlines()
    for question in (
        "Did it pass?",
        "Where is time spent?",
        "What did unequal TP sizes cost?",
        "How do I run",
    ):
        assert sum(line.startswith(f"**{question}") for line in lines) == 1
    assert "| more, ms | +0.00 |" in lines
    assert any(line.startswith(f"git checkout {'c' * 40}") for line in lines)
    assert "### BHLNC → BHLNC: ms per request" in lines
    assert "| P 1 | 4.00 ms (too few for an interval) |" in lines
    at = lines.index("## What limits this run") + len(["", "a note"])
    assert lines[at + 2].startswith("| cell_id | limit | queue % | prefill % | ticket % |")
    assert lines[at + 4].startswith("| p1-d2-BHLNC-BHLNC | decode step | 1.0 | 18.0 | 1.0 |")


def test_loading_is_told_by_the_rank_that_took_most(tmp_path: Path) -> None:
    def ranks(*peaks: int | None) -> list[dict[str, int | None]]:
        sizes = {"weight_bytes": 4 * MIB, "max_read_bytes": MIB, "load_device_peak_bytes": None}
        return [sizes | {"weight_bytes": (3 + i) * MIB, "load_peak_bytes": p} for i, p in enumerate(peaks)]

    writer = ResultWriter(tmp_path, spec_yaml=SPEC, environment={})
    for number, peak in enumerate((6, 7)):
        memory = {"prefill": ranks(5 * MIB, peak * MIB), "decode": ranks(None)}
        row = cell_row(2, 1, ("BHLNC", "BHLNC"), cell_id=str(number), load_memory=memory)
        writer.write_cell(row, [], [])
    writer.write_cell(cell_row(1, 4, ("BHLNC", "BHLNC")), [], [])
    writer.finish()
    result = load(tmp_path)
    assert result.cells["prefill.load_peak_bytes"][0].tolist() == [5 * MIB, 6 * MIB]
    assert result.cells["prefill.load_device_peak_bytes"].isna().all()
    assert loading_rows(result) == [
        {
            "side": side,
            "tp": tp,
            "divided": "",
            "num_cells": 2,
            "weight_bytes": weights * MIB,
            "max_read_bytes": MIB,
            "load_peak_bytes": peak,
            "load_device_peak_bytes": None,
        }
        for side, tp, weights, peak in (("prefill", 2, 4, 7 * MIB), ("decode", 1, 3, None))
    ]
    text = markdown(result)
    table = text[text.index("What loading weights takes") :]
    row = next(line for line in table.splitlines() if "prefill" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][:5] == ["prefill", "2", "4", "1", "7"]
