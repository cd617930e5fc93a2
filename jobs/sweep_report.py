"""What jobs/transfer_sweep.py shows: a table on the screen, files, and a page."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.sweep_cells import Sweep
from rayk.reports.environment import collect_environment
from rayk.reports.html import write_page
from rayk.reports.md_table import markdown_table
from rayk.reports.page import Column, Page, Section, text_rows
from rayk.reports.table_files import claim_folder, write_tables

Rows = Sequence[Mapping[str, Any]]

CEILING_COLUMNS = (
    Column(title="what", key="what"),
    Column(title="mode", key="mode"),
    Column(title="TP", key="tp"),
    Column(title="layouts", key="layouts"),
    Column(title="blocks", key="block_sizes"),
    Column(title="tables", key="tables"),
    Column(title="run, bytes", key="run_bytes", spec=",d"),
    Column(title="bytes", key="num_bytes", spec=",d"),
    Column(title="descriptors", key="num_descriptors", spec=",d"),
    Column(title="merged", key="num_merged", spec=",d"),
    Column(title="GB/s", key="gb_per_s", spec=".2f"),
    Column(title="bare NIXL, GB/s", key="raw_gb_per_s", spec=".2f"),
    Column(title="memcpy, GB/s", key="memcpy_gb_per_s", spec=".2f"),
    Column(title="of bare NIXL", key="of_raw", spec=".0%"),
    Column(title="CPU with digests, ms", key="cpu_ms", spec=".2f"),
    Column(title="post, ms", key="post_ms", spec=".2f"),
    Column(title="wait, ms", key="wait_ms", spec=".2f"),
    Column(title="staging", key="staging"),
    Column(title="staged", key="staged"),
    Column(title="transport", key="transport"),
    Column(title="loopback, % of bytes", key="loopback_percent", spec=".1f"),
    Column(title="note", key="note"),
)
SUMMARY_COLUMNS = (
    Column(title="shape", key="shape"),
    Column(title="mode", key="mode"),
    Column(title="cells", key="cells", spec=",d"),
    Column(title="passed", key="passed", spec=",d"),
    Column(title="bytes moved", key="num_bytes", spec=",d"),
    Column(title="wrong bytes", key="num_wrong_bytes", spec=",d"),
    Column(title="descriptors", key="num_descriptors", spec=",d"),
    Column(title="merged", key="num_merged", spec=",d"),
)
CELL_COLUMNS = (
    Column(title="verdict", key="verdict"),
    Column(title="shape", key="shape"),
    Column(title="mode", key="mode"),
    Column(title="TP", key="tp"),
    Column(title="layouts", key="layouts"),
    Column(title="blocks", key="block_sizes"),
    Column(title="tables", key="tables"),
    Column(title="bytes", key="num_bytes", spec=",d"),
    Column(title="descriptors", key="num_descriptors", spec=",d"),
    Column(title="merged", key="num_merged", spec=",d"),
    Column(title="reason", key="reason"),
)

_NOTHING = {"num_bytes": None, "num_descriptors": None, "num_merged": None}
"""Of cells that did not get so far."""


def summary_rows(rows: Rows) -> list[dict[str, Any]]:
    """By shape and mode."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["mode"]), []).append(row)
    return [
        {
            "shape": shape,
            "mode": mode,
            "cells": len(of),
            "passed": sum(r["verdict"] == "PASS" for r in of),
            **{
                name: sum(r.get(name) or 0 for r in of)
                for name in ("num_bytes", "num_wrong_bytes", "num_descriptors", "num_merged")
            },
        }
        for (shape, mode), of in groups.items()
    ]


def print_sweep(sweep: Sweep, rows: Rows, folder: Path, wall_s: float) -> None:
    """The table by shape, and what failed."""
    print(markdown(SUMMARY_COLUMNS, summary_rows(rows)))
    for row in rows:
        if row["verdict"] != "PASS":
            print(f"{row['verdict']}: {row['cell_id']}: {row['reason']}")
    verdicts = Counter(row["verdict"] for row in rows)
    told = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common())
    refused = f"; {len(sweep.refused)} left out: {sweep.refused[0][1]}" if sweep.refused else ""
    print(f"\n{len(rows)} cells in {wall_s:.0f} s: {told}{refused}")
    print(f"report: {folder / 'report.html'}")


def print_ceiling(rows: Rows, folder: Path) -> None:
    """The table of rates."""
    print(markdown(CEILING_COLUMNS, rows))
    print(f"\nreport: {folder / 'report.html'}")


def markdown(columns: Sequence[Column], rows: Rows) -> str:
    """A Markdown table."""
    return "\n".join(markdown_table([c.title for c in columns], text_rows(columns, rows)))


def write_results(sweep: Sweep, rows: Rows, out: Path | None, wall_s: float, *, ceiling: bool) -> Path:
    """Tables and the page; the folder."""
    name = "ceiling" if ceiling else "cells"
    folder = out or Path("runs") / f"{sweep.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    claim_folder(folder, [name])
    write_tables({name: rows}, folder)
    environment = collect_environment(command=sys.argv, seeds={}, cells=len(rows), inputs={})
    if ceiling:
        sections = [
            Section(
                title="Rates",
                note="Medians over rounds in which rayk and bare NIXL with the same descriptors take turns, "
                "with one dense copy before each. On one CPU host posting a transfer blocks until it is "
                "done. Ray RDT pulls whole tensors: no head slices, no strides, no blocks picked or laid out "
                "anew, no leases.",
                columns=CEILING_COLUMNS,
                rows=rows,
            )
        ]
    else:
        sections = [
            Section(title="By shape", columns=SUMMARY_COLUMNS, rows=summary_rows(rows)),
            Section(title="Cells", columns=CELL_COLUMNS, rows=[_NOTHING | dict(row) for row in rows]),
        ]
    wrong = sum(row.get("verdict", "PASS") != "PASS" for row in rows)
    write_page(
        Page(
            eyebrow="transfer sweep",
            title=sweep.name,
            chips=[("unmet", f"{wrong} failed") if wrong else ("met", "every byte right")],
            stats=[(str(len(rows)), "transfers"), (f"{wall_s:.0f} s", "in all")],
            sections=sections,
            environment=environment,
        ),
        folder / "report.html",
    )
    return folder
