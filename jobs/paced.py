"""Fleets of paced engines (jobs/paced.yaml), and how far a simulation of them is from what they do.

    python jobs/paced.py [--pace 2] [--repeats 3] [--part K/N] [--only NAME] [--quick] [--work DIR] [--record]

The engines compute nothing: a step waits until its time of a cost table is over. All else is real. The folder
--work is continued by another call, and holds:

    tables      the cost tables that the engines go by; without --costs they are made up, for no machine
    gaps        fleets of 2, 6 and 12 engines, to which the gaps between processes, and reads, are fitted
    costs       the tables with these gaps: what the simulation goes by
    cells-4...  the 27 cells by number of engines, `--repeats` times each
    again-...   those of a run that did not keep their pace (OUT_OF_PACE), once more
    validation  predictions beside measurements: report.html, and a run folder of what was predicted

With `--pace P` steps take P times as long and requests come P times as seldom: a busier machine keeps up.
Parts run one after another; each call predicts all cells that the folder then has.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from jobs.benchmarks.harness import Page, option, part, run
from jobs.plan_validation import Point, points
from rayk.cli.guard import run_guarded
from rayk.cli.progress import RunProgress
from rayk.costs.book import CostBook
from rayk.costs.table import EngineCosts, StepTable, engine_key
from rayk.engine.paced import find_costs
from rayk.experiments.planning import plan_experiment
from rayk.experiments.run import run_experiment
from rayk.planner.between import fit_gaps, fit_reads
from rayk.planner.fitting import provenance
from rayk.planner.recorded import RecordedRun, read_run
from rayk.planner.validate import ValidationPlan, validate
from rayk.reports import Result, load
from rayk.reports.page import Column
from rayk.reports.validation import Judged, Validation, metric_rows, worst_cell
from rayk.reports.validation_page import ERRORS, cell_columns, cell_rows, shown_metrics, worst_text
from rayk.specs import load_spec
from rayk.types.errors import UserError
from rayk.types.slo import Slo

SPEC = Path(__file__).with_suffix(".yaml")
MADE_UP = StepTable(terms=("one", "requests", "tokens"), constants=(60e6, 5e6, 0.4e6))
HOST_NS, REQUEST_HOST_NS = 2e6, 0.1e6  # of a turn beside its step, and per request
SLO_MS = {"ttft": 500.0, "tpot": 125.0}  # at pace 1
QUICK = 0.2
"""Share of the requests that `--quick` sends."""
GAPS = ((1, 1, 1.0, 30), (3, 3, 4.0, 100), (6, 6, 8.0, 200))
"""Prefill and decode engines, requests per second and their number: none of these fleets is judged."""
RANKED = ("ttft_ms_p50", "tpot_ms_p50")
MIN_TAU = 0.9
OUT_OF_PACE = "OUT_OF_PACE"

HEAD = (
    "Engines that compute nothing keep the times of a table; Ray, lines, schedulers, policies and transfers",
    "are real. Predicted over measured, less 1, from the same arrivals, prompts and lengths of answers; gaps",
    "and reads were fitted to other fleets. A bound is missed where half of the cells are off by more than",
    "it, and than twice the spread of the repeats.",
)
CELLS = (
    Column("cell", "name"),
    Column("verdict", "verdict"),
    Column("late p99, of a step", "late_p99_share", ".1%"),
    Column("machine busy", "machine_busy_share", ".0%"),
)


def make_up(spec: str, overrides: list[str], folder: Path) -> None:
    """Write tables for every engine of a spec's cells."""
    loaded = load_spec(spec, [*overrides, f"engine.costs={folder}"])
    plan = plan_experiment(loaded, folder.with_name(f"{folder.name}-plan"), tell=_say)
    flat = EngineCosts.flat(0.0, host_ns=HOST_NS, request_host_ns=REQUEST_HOST_NS)
    engines = {}
    for cell, _ in plan.cells:
        for engine in cell.engines:
            key = engine_key(plan.configs[cell.spec.model], engine)
            made = replace(flat, key=key, decode=MADE_UP, prefill=MADE_UP)
            engines[key] = replace(made, kind="unmeasured", source="made up by jobs/paced.py")
    CostBook(engines=engines).save(folder)


def num_engines(point: Point) -> int:
    return int(point["prefill.num_engines"]) + int(point["decode.num_engines"])


def name_of(point: Point) -> str:
    """Name a cell, e.g. `8 engines 2:6 least_loaded`."""
    ratio = f"{point['prefill.num_engines']}:{point['decode.num_engines']}"
    return f"{num_engines(point)} engines {ratio} {point['policy']}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured."""

    runs: list[Path]
    names: dict[str, str]
    """Cell -> its name."""
    skipped: dict[tuple[str, str], str]
    """(run, cell) -> why a later run has the cell."""
    rows: list[dict[str, Any]]


class FleetJob:
    """The runs of a folder, in the order in which they are needed."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._work: Path = asked.work
        self._tables = asked.costs or self.folder("tables")
        spec = load_spec(SPEC).spec
        self._base = spec.model_dump(mode="json", exclude_unset=True, exclude={"matrix"})
        limits = {name: asked.pace * seconds for name, seconds in self._base["deadlines"].items()}
        engine = self._base["engine"] | {"costs": str(self._tables), "pace": asked.pace}
        self._base |= {"deadlines": limits, "engine": engine}
        chosen = [point for point in points(spec.matrix) if asked.only in name_of(point)]
        number, parts = asked.part
        each = -(-len(chosen) // parts)
        self.own = chosen[(number - 1) * each : number * each]
        self.costs = self.folder("costs")

    def folder(self, name: str) -> Path:
        found: Path = self._work / name
        return found

    def fit(self) -> None:
        """Write the tables that engines go by, and those that the simulation goes by."""
        if self._asked.costs is None and not self._tables.is_dir():
            make_up(str(SPEC), [], self._tables)
        matrix = [
            {
                "prefill.num_engines": prefill,
                "decode.num_engines": decode,
                "arrival.rate": rate,
                "prompts.random.count": count,
            }
            for prefill, decode, rate, count in (GAPS[:2] if self._asked.quick else GAPS)
        ]
        prompts = {"random": self._base["prompts"]["random"] | {"seed": 1}}
        engine = self._base["engine"] | {"record_steps": True}
        changes = {"prompts": prompts, "engine": engine, "repeat": 1}
        found = [run for folder in self._run_twice(matrix, "gaps", changes) if (run := _kept(folder))]
        if not found:
            raise UserError("no fleet kept its pace", where=str(self._work), mend="a larger --pace")
        cells = [cell for run in found for cell in run.cells]
        table, engines = CostBook.load(self._tables), {}
        for cell in cells:
            for config in cell.cell.engines:
                key = engine_key(cell.config, config)
                engines[key] = replace(find_costs(table, cell.config, config), key=key)
        CostBook(
            engines=engines,
            transfers=fit_reads(cells),
            gaps=fit_gaps(cells, num_cores=0),  # paced engines sleep
            provenance=provenance(found),
        ).save(self.costs)

    def measure(self) -> None:
        """Run this part's cells, fleet size by fleet size, then those again that did not keep their pace."""
        number, parts = self._asked.part
        for size in sorted({num_engines(point) for point in self.own}):
            piece = f"{size}-{number}-of-{parts}" if parts > 1 else str(size)
            of_size = [point for point in self.own if num_engines(point) == size]
            self._run_twice(of_size, f"cells-{piece}", {})

    def _run_twice(self, of: Sequence[Point], name: str, changes: Mapping[str, Any]) -> list[Path]:
        """Run cells, then those again that did not keep their pace. Returns the runs' folders."""
        folders, left = [], list(of)
        for folder in (self.folder(name), self.folder(f"again-{name}")):
            folders.append(folder)
            ids, result = self.run(self.spec_of(left) | changes, folder)
            late = set(result.cells.loc[result.cells["verdict"] == OUT_OF_PACE, "cell_id"])
            left = [point for point, cell_id in zip(left, ids, strict=True) if cell_id in late]
            if not left or self._asked.once:
                break
        return folders

    def spec_of(self, of: Sequence[Point]) -> dict[str, Any]:
        """Make a spec of these cells, as slow and as short as is asked for."""
        share = QUICK if self._asked.quick else 1.0
        matrix = [
            {name: [value] for name, value in point.items()}
            | {
                "arrival.rate": [float(point["arrival.rate"]) / self._asked.pace],
                "prompts.random.count": [round(share * int(point["prompts.random.count"]))],
            }
            for point in of
        ]
        return self._base | {"matrix": matrix, "repeat": self._asked.repeats}

    def measured(self) -> Measured:
        """Read all parts' cells, the last measurement of each."""
        runs = [run for name in ("cells-*", "again-cells-*") for run in sorted(self._work.glob(name))]
        found = Measured(runs=runs, names={}, skipped={}, rows=[])
        last: dict[str, tuple[Path, dict[str, Any]]] = {}
        for folder in runs:
            for row in load(folder).cells.to_dict("records"):
                cell_id = row["cell_id"]
                if cell_id in last:
                    before = str(last[cell_id][0])
                    found.skipped[before, cell_id] = "measured again: it did not keep its pace"
                found.names[cell_id] = name_of({str(axis): value for axis, value in row.items()})
                last[cell_id] = folder, row | {"name": found.names[cell_id]}
        found.rows.extend(row for _, row in last.values())
        return found

    def run(self, spec: Mapping[str, Any], folder: Path) -> tuple[list[str], Result]:
        """Run what is left of a spec. Returns the cells' ids in their order, and the tables."""
        plan = plan_experiment(load_spec(dict(spec), source=folder.name), folder, resume=True, tell=_say)
        progress = RunProgress()
        with contextlib.redirect_stdout(sys.stderr), progress:
            result = run_experiment(plan, progress=progress)
        return [cell.cell_id for cell, _ in plan.cells], result


def _kept(folder: Path) -> RecordedRun | None:
    """Read the cells of a run that kept their pace; None where none did."""
    with contextlib.suppress(UserError):
        return read_run(folder)
    return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(asked: argparse.Namespace, page: Page) -> list[str]:
    job = FleetJob(asked)
    job.fit()
    job.measure()
    measured = job.measured()
    limits = {name: asked.pace * limit for name, limit in SLO_MS.items()}
    found = validate(
        ValidationPlan(
            runs=measured.runs,
            costs=job.costs,
            out=job.folder("validation"),
            judged=Judged(slos=Slo(limits_ms=limits)),
            skipped=measured.skipped,
        ),
        tell=lambda number, total, cell_id: _say(f"predicting {number + 1} of {total}: {cell_id}"),
    )
    return tell(page, found, measured, asked.pace)


def tell(page: Page, found: Validation, measured: Measured, pace: float) -> list[str]:
    """Fill the page; returns what is missed."""
    rows = metric_rows(found.errors)
    page.say(*HEAD, "", f"engine.pace: {pace:g}.", "")
    page.section("Errors by metric", ERRORS, shown_metrics(rows))
    worst = worst_cell(found)
    if worst is not None:
        page.say(f"Worst cell: {worst_text(worst).replace(worst.cell_id, measured.names[worst.cell_id])}", "")
    of_cells = [row | {"cell_id": measured.names[row["cell_id"]]} for row in cell_rows(found.errors)]
    page.section("Errors by cell, %", cell_columns(), of_cells)
    page.section("How cells kept their pace", CELLS, measured.rows)
    predicted = set(found.errors["cell_id"])
    for cell_id, why in found.facts["left_out"]:
        if cell_id in predicted:
            continue  # as it was measured again
        page.say(f"Left out: {measured.names.get(cell_id, cell_id)}: {why}.")
    page.tables = {"errors": found.errors.to_dict("records"), "stages": found.stages.to_dict("records")}
    missed = [
        f"{row['title']}: half of the cells are within {row['median']:.1%}, bound {row['bound']:.0%}"
        for row in rows
        if row["is_missed"]
    ]
    taus = {row["title"]: row["tau_apart"] for row in rows if row["metric"] in RANKED}
    low = {title: tau for title, tau in taus.items() if tau < MIN_TAU}
    return missed + [f"{title}: tau {tau:.2f}, {MIN_TAU} is asked for" for title, tau in low.items()]


def main() -> int:
    return run(
        measure,
        __file__,
        title="Simulated fleets against paced ones",
        work=option(Path("runs/paced"), "folder of the runs, continued if it is there"),
        pace=option(2.0, "times slower than the tables"),
        part={"type": part, "default": "1/1", "metavar": "K/N", "help": "the Kth of N parts of the cells"},
        repeats=option(3, "of each cell"),
        only=option("", "cells whose names hold this, such as '8 engines 2:6'"),
        costs={
            "type": Path,
            "metavar": "DIR",
            "help": "tables for the engines to go by",
        },
        quick={"action": "store_true", "help": "a fifth of the requests: to see that all works"},
        once={"action": "store_true", "help": "do not measure cells again that did not keep their pace"},
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
