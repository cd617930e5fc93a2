"""Every transfer without a model: oracle-filled pages moved between two Ray actors over NIXL, byte by byte.

    python jobs/transfer_sweep.py                       # the cells of jobs/transfer_sweep.yaml

Each cell is a pair of engines: TP sizes, layouts, block sizes, what the layers keep, pull or push. The
producer's pages hold f(layer, field, unit, token, byte), the consumer's are poisoned. Then every byte of
every page is compared with what f says: the request's rows right, all else untouched. Digests are compared as
in an engine, and every producer rank must be told when it may free. Exit status 1 for anything wrong.

jobs/benchmarks/transfer_ceiling.py times larger ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from jobs.benchmarks.harness import above_zero
from jobs.sweep_cells import SPEC, Sweep, SweepCell, load_sweep, some_of
from rayk.cli.guard import run_guarded
from rayk.reports import collect_environment
from rayk.reports.html import write_page
from rayk.reports.md_table import markdown_table
from rayk.reports.page import Column, Page, Section, text_rows
from rayk.reports.table_files import claim_folder, write_tables
from rayk.types.errors import RaykError

Rows = Sequence[Mapping[str, Any]]

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
    titles = [column.title for column in SUMMARY_COLUMNS]
    print("\n".join(markdown_table(titles, text_rows(SUMMARY_COLUMNS, summary_rows(rows)))))
    for row in rows:
        if row["verdict"] != "PASS":
            print(f"{row['verdict']}: {row['cell_id']}: {row['reason']}")
    verdicts = Counter(row["verdict"] for row in rows)
    told = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common())
    refused = f"; {len(sweep.refused)} left out: {sweep.refused[0][1]}" if sweep.refused else ""
    print(f"\n{len(rows)} cells in {wall_s:.0f} s: {told}{refused}")
    print(f"report: {folder / 'report.html'}")


def write_results(sweep: Sweep, rows: Rows, folder: Path, wall_s: float) -> None:
    write_tables({"cells": rows}, folder)
    wrong = sum(row["verdict"] != "PASS" for row in rows)
    page = Page(
        eyebrow="transfer sweep",
        title=sweep.name,
        chips=[("unmet", f"{wrong} failed") if wrong else ("met", "every byte right")],
        stats=[(str(len(rows)), "transfers"), (f"{wall_s:.0f} s", "in all")],
        sections=[
            Section(title="By shape", columns=SUMMARY_COLUMNS, rows=summary_rows(rows)),
            Section(title="Cells", columns=CELL_COLUMNS, rows=[_NOTHING | dict(row) for row in rows]),
        ],
        environment=collect_environment(command=sys.argv, seeds={}, cells=len(rows), inputs={}),
    )
    write_page(page, folder / "report.html")


def run_cell(cell: SweepCell, hosts: Any) -> dict[str, Any]:
    """Move one request and check everything; a row."""
    row = {
        "cell_id": cell.cell_id,
        "shape": cell.shape,
        "mode": cell.mode,
        **cell.sides,
        "num_tokens": cell.num_tokens,
        "verdict": "PASS",
        "reason": "",
        "num_wrong_bytes": 0,
    }
    try:
        row |= hosts.move(cell)
    except RaykError as error:
        return row | {"verdict": type(error).__name__, "reason": str(error)}
    wrong = [(rank, n, text) for rank, (n, text) in enumerate(row.pop("wrong")) if n]
    row["num_wrong_bytes"] = sum(n for _, n, _ in wrong)
    if wrong:
        row |= {"verdict": "KV_MISMATCH", "reason": f"consumer rank {wrong[0][0]}: {wrong[0][2]}"}
    elif row["num_wrong_words"]:
        row |= {"verdict": "KV_MISMATCH", "reason": f"{row['num_wrong_words']} digest words differ"}
    elif not row["released"]:
        row |= {"verdict": "TRANSFER_ERROR", "reason": "a producer rank was never told that it may free"}
    return row


def run_job(options: argparse.Namespace) -> int:
    """Run the cells on Ray; tables, report and verdict. Raises UserError for a bad file."""
    from jobs.sweep_actors import Hosts
    from rayk.actors.launch import connect

    sweep = load_sweep(options.spec)
    folder = options.out or Path("runs") / f"{sweep.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    claim_folder(folder, ["cells"])
    began = time.monotonic()
    with connect(options.address):
        hosts = Hosts()
        rows = [run_cell(cell, hosts) for cell in some_of(sweep.cells, options.limit)]
        hosts.close()
    wall_s = time.monotonic() - began
    write_results(sweep, rows, folder, wall_s)
    print_sweep(sweep, rows, folder, wall_s)
    return int(any(row["verdict"] != "PASS" for row in rows))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", type=Path, default=SPEC)
    parser.add_argument("--out", type=Path, help="where tables and the report go")
    parser.add_argument("--address", help="a running Ray cluster; else a local one is started")
    parser.add_argument("--limit", type=above_zero, metavar="N", help="only so many cells, spread over all")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse_options()
    sys.exit(run_guarded(lambda: run_job(chosen)))
