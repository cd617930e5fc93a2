"""How far rayk's predictions are from what two cores do, in cells that no cost table was fitted to.

    python jobs/plan_validation.py [--quick] [--only NAME] [--part K/N] [--repeats 3] [--work DIR] [--record]

Needs a quiet machine. The folder --work is continued by another call, and holds:

    costs       what `rayk costs` measures of each model, and the tables fitted to it
    groups      a folder for each model and configuration: what the points of jobs/plan_validation.yaml can
                take (capacity: all prompts at once), the same at 0.5, 0.7 and 0.85 of that, `--repeats` times
                each (cells), and once at 0.95 (unbound)
    validation  predictions beside measurements: report.html, and run folders of what was predicted

Before each cell the job waits until the machine is quiet (--patience), and looks again after it. Cells beside
which others used the machine are measured again (--rounds); one that never had a quiet machine is reported by
name, without a bound, and so are cells at 0.95. An answer is good if it keeps 3 times the median TTFT and 1.5
times the median TPOT of its own point at the lightest load.

--part measures every Nth group. The page is of all groups that are there, whichever call measured them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from jobs.benchmarks.harness import Page, option, part, run
from jobs.quiet_machine import QuietProgress
from rayk.actors.tokenizer import load_encoder
from rayk.cli.guard import run_guarded
from rayk.cli.progress import RunProgress
from rayk.experiments.planning import plan_experiment
from rayk.experiments.run import run_experiment
from rayk.models.families import read_config
from rayk.models.hub import config_file
from rayk.planner.coverage import told
from rayk.planner.fitting import fit_runs
from rayk.planner.measure import GridRequest, grid_spec
from rayk.planner.recorded import read_run
from rayk.planner.validate import ValidationPlan, validate
from rayk.planner.wanted import wanted_by
from rayk.reports import load
from rayk.reports.page import Column
from rayk.reports.trust import predicted_text
from rayk.reports.validation import Judged, Validation, metric_rows, worst_cell
from rayk.reports.validation_page import ERRORS, cell_columns, cell_rows, shown_metrics, worst_text
from rayk.specs import load_spec
from rayk.types.files import parse_json, read_text, write_atomically
from rayk.types.slo import Slo

SPEC = Path(__file__).with_suffix(".yaml")
RATES = (0.5, 0.7, 0.85, 0.95)
UNBOUND = 0.95
QUICK_RATES = {"x1": (0.7, 0.85), "x2": (0.7,), "TP 2": (0.7,), "P/D 1:1": (0.7, 0.85)}
"""Of the quick form, by configuration; of balanced traffic alone."""
TRAFFIC = {8: "prefill-heavy", 40: "balanced", 96: "decode-heavy"}
"""Names of the YAML file's kinds of traffic, by their max_tokens."""
TTFT_FACTOR, TPOT_FACTOR = 3.0, 1.5
MIDDLE = (0.2, 0.8)  # of the answers: between them requests end as fast as they can
NOTES, DONE = "busy.json", "done.json"
NOTES_BYTES = 1 << 20
CAPACITIES = (Column("point", "name"), Column("requests/s", "rate", ",.2f"))

HEAD = (
    "Predicted over measured, less 1, of cells that no table was fitted to, from their own arrivals, prompts",
    "and lengths of answers. A bound is for half of the cells; it is missed where half are off by more than",
    "it, and than twice the spread of the repeats.",
)

Point = Mapping[str, Any]
"""A cell of the matrix: axes and their values."""


@dataclass(frozen=True, kw_only=True)
class LoadedPoint:
    """A point at a share of its capacity."""

    point: Point
    share: float
    capacity: float  # requests per second

    @property
    def rate(self) -> float:
        return round(self.share * self.capacity, 3)

    @property
    def name_of_point(self) -> str:
        return name_of(self.point)

    @property
    def name(self) -> str:
        return f"{self.name_of_point} at {self.share:g}"


def points(matrix: Sequence[Mapping[str, Sequence[Any]]]) -> list[Point]:
    """List the points of a spec's matrix, in the order of its cells."""
    return [dict(zip(of, values, strict=True)) for of in matrix for values in product(*of.values())]


def configuration(point: Point) -> str:
    if point.get("mode") != "aggregated":
        return "P/D 1:1"
    tp = point.get("prefill.tp", 1)
    return f"TP {tp}" if tp > 1 else f"x{point.get('prefill.num_engines', 1)}"


def name_of(point: Point) -> str:
    """Name a point, e.g. `llama x2 balanced`."""
    model = Path(point["model"]).name.removeprefix("plan-")
    return f"{model} {configuration(point)} {TRAFFIC[point['sampling.max_tokens']]}"


def grouped(of: Sequence[Point], *, quick: bool, only: str) -> dict[str, list[tuple[Point, Sequence[float]]]]:
    """Group points by model and configuration, each with the loads at which it is measured."""
    groups: dict[str, list[tuple[Point, Sequence[float]]]] = {}
    for point in of:
        kind = TRAFFIC[point["sampling.max_tokens"]]
        if only not in name_of(point) or (quick and kind != "balanced"):
            continue
        rates = QUICK_RATES[configuration(point)] if quick else RATES
        groups.setdefault(name_of(point).removesuffix(f" {kind}"), []).append((point, rates))
    return groups


def measure(asked: argparse.Namespace, page: Page) -> list[str]:
    job = _Job(asked)
    job.measure_costs()
    if asked.quick:
        page.name = "plan_validation_quick"
    number, parts = asked.part
    for name in list(job.groups)[number - 1 :: parts]:
        job.measure_group(name)
    measured = job.measured()
    found = validate(
        ValidationPlan(
            runs=[Path(run) for run in measured.runs],
            costs=job.costs,
            out=job.folder("validation"),
            judged=Judged(slos=measured.slos(), unbound=measured.unbound()),
            skipped=measured.skipped(),
            extrapolate=asked.extrapolate or asked.quick,
        ),
        tell=lambda number, total, cell_id: _say(f"predicting {number + 1} of {total}: {cell_id}"),
    )
    return tell(page, found, measured, [name for name in job.groups if name not in measured.groups])


@dataclass(kw_only=True)
class QuietRuns:
    """A run, and the runs in which those of its cells were measured again that had no quiet machine."""

    runs: list[str] = field(default_factory=list)
    cells: dict[str, int] = field(default_factory=dict)
    """Cell -> number of its point."""
    again: list[tuple[str, str, str]] = field(default_factory=list)
    """Run, cell, and why a later run has it."""
    busy: dict[str, float] = field(default_factory=dict)
    """Cells that never had a quiet machine, and how busy it was."""

    def add(self, others: QuietRuns) -> None:
        """Put other cells beside these."""
        self.runs += others.runs
        self.cells |= others.cells
        self.again += others.again
        self.busy |= others.busy


def requests_of(runs: Sequence[str]) -> dict[str, Any]:
    """Read each cell's requests, of the last run that has it: that one counts."""
    found: dict[str, Any] = {}
    for run_folder in runs:
        found |= dict(iter(load(run_folder).requests.groupby("cell_id", sort=False)))
    return found


@dataclass(kw_only=True)
class Measured:
    """The loaded cells that are there."""

    groups: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    cells: dict[str, LoadedPoint] = field(default_factory=dict)
    again: list[tuple[str, str, str]] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    capacities: dict[str, float] = field(default_factory=dict)
    """Name of a point -> requests per second."""

    def add(self, group: str, runs: QuietRuns, cells: Mapping[str, LoadedPoint]) -> None:
        self.groups.append(group)
        self.runs += runs.runs
        self.cells.update(cells)
        self.again += runs.again
        self.busy |= runs.busy
        self.capacities |= {loaded.name_of_point: loaded.capacity for loaded in cells.values()}

    def skipped(self) -> dict[tuple[str, str], str]:
        return {(run_folder, cell): why for run_folder, cell, why in self.again}

    def unbound(self) -> set[str]:
        return {c for c, loaded in self.cells.items() if loaded.share >= UNBOUND} | self.busy.keys()

    def slos(self) -> dict[str, Slo]:
        """Limit each point's cells by the medians of its lightest load."""
        requests = requests_of(self.runs)
        limits: dict[str, Slo] = {}
        for cell_id, loaded in sorted(self.cells.items(), key=lambda item: item[1].share):
            if loaded.name_of_point not in limits:
                medians = requests[cell_id][["ttft_ms", "tpot_ms"]].median()
                limits[loaded.name_of_point] = Slo(
                    limits_ms={
                        "ttft": round(TTFT_FACTOR * float(medians["ttft_ms"]), 1),
                        "tpot": round(TPOT_FACTOR * float(medians["tpot_ms"]), 2),
                    }
                )
        return {cell_id: limits[loaded.name_of_point] for cell_id, loaded in self.cells.items()}


class _Job:
    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._spec = load_spec(SPEC)
        self._base = self._spec.spec.model_dump(mode="json", exclude_unset=True)
        self.groups = grouped(points(self._base["matrix"]), quick=asked.quick, only=asked.only)
        self.costs = self.folder("costs")

    def folder(self, what: str) -> Path:
        found: Path = self._asked.work / f"{what}{'-quick' if self._asked.quick else ''}"
        return found

    def measure_costs(self) -> None:
        """Measure the models, and fit their tables to cells that had a quiet machine."""
        plan_experiment(self._spec, self.folder("plan"), tell=_say)  # writes the checkpoints
        kinds = {configuration(point) for of in self.groups.values() for point, _ in of}
        models = dict.fromkeys(point["model"] for of in self.groups.values() for point, _ in of)
        recorded = []
        for model in models:
            wanted = replace(
                wanted_by(SPEC, model, load_encoder),
                tp=(1, 2) if "TP 2" in kinds else (1,),
                pairs=((1, 1),) if "P/D 1:1" in kinds else (),
            )
            asked = GridRequest(
                model=model,
                has_neighbours=bool(kinds & {"x2", "P/D 1:1"}),
                is_quick=self._asked.quick,
                **asdict(wanted),
            )
            grid = grid_spec(asked, read_config(config_file(model)[1]))
            found = self._run_quietly(grid, points(grid["matrix"]), self.costs / Path(model).name)
            again = {(run_folder, cell) for run_folder, cell, _ in found.again}
            for run_folder in found.runs:
                of_run = read_run(run_folder)
                kept = tuple(c for c in of_run.cells if (run_folder, c.cell.cell_id) not in again)
                recorded.append(replace(of_run, cells=kept))
        fitted = fit_runs(recorded)
        for line in told(fitted):
            _say(line)
        fitted.book.save(self.costs)

    def measure_group(self, name: str) -> None:
        """Measure what a group's points can take, then the same at shares of that."""
        of, folder = self.groups[name], self._group_folder(name)
        found = self._run_quietly(self._base, [point for point, _ in of], folder / "capacity")
        requests = requests_of(found.runs)
        rates = {number: _middle_rate(requests[cell]) for cell, number in found.cells.items()}
        wanted = [
            LoadedPoint(point=point, share=share, capacity=rates[number])
            for number, (point, shares) in enumerate(of)
            for share in shares
        ]
        runs = QuietRuns()
        cells: dict[str, Any] = {}
        for at, repeats, is_bound in (("cells", self._asked.repeats, True), ("unbound", 1, False)):
            chosen = [w for w in wanted if (w.share < UNBOUND) == is_bound]
            if not chosen:
                continue
            loaded = self._run_quietly(
                {**self._base, "repeat": repeats},
                [{**w.point, "arrival.rate": w.rate} for w in chosen],
                folder / at,
            )
            runs.add(loaded)
            cells |= {cell: asdict(chosen[number]) for cell, number in loaded.cells.items()}
        text = json.dumps({"runs": asdict(runs), "cells": cells}, indent=1)
        write_atomically(folder / DONE, text + "\n")

    def measured(self) -> Measured:
        """Read the groups that are whole, whichever call measured them."""
        found = Measured()
        for name in self.groups:
            path = self._group_folder(name) / DONE
            if path.is_file():
                told_of = parse_json(read_text(path, NOTES_BYTES))
                runs = QuietRuns(**told_of["runs"])
                found.add(name, runs, {c: LoadedPoint(**point) for c, point in told_of["cells"].items()})
        return found

    def _group_folder(self, name: str) -> Path:
        return self.folder("groups") / name.replace("/", "").replace(" ", "-").replace(":", "-")

    def _run_quietly(self, spec: Mapping[str, Any], of: Sequence[Point], folder: Path) -> QuietRuns:
        """Run the points, then those again beside which others used the machine."""
        found = QuietRuns()
        left = list(range(len(of)))
        for number in range(self._asked.rounds + 1):
            at = folder.with_name(f"{folder.name}-again-{number}") if number else folder
            matrix = [{name: [value] for name, value in of[index].items()} for index in left]
            ids, noted = self._run({**spec, "matrix": matrix}, at)
            of_run = dict(zip(ids, left, strict=True))
            found.runs.append(str(at))
            found.cells |= of_run
            busy = {cell: share for cell, share in noted.items() if cell in of_run}
            if not busy or number == self._asked.rounds:
                found.busy = busy
                break
            found.again += [
                (str(at), cell, f"measured again: others used {share:.0%} of the cores")
                for cell, share in busy.items()
            ]
            left = [of_run[cell] for cell in busy]
        return found

    def _run(self, spec: Mapping[str, Any], folder: Path) -> tuple[list[str], dict[str, float]]:
        """Run what is left of a spec. Returns the cells' ids in their order, and the cells beside which the
        machine was busy, in this call or an earlier one."""
        plan = plan_experiment(load_spec(spec, source=folder.name), folder, resume=True, tell=_say)
        notes = folder / NOTES
        known = parse_json(read_text(notes, NOTES_BYTES)) if notes.is_file() else {}
        progress = QuietProgress(RunProgress(), patience_s=self._asked.patience)
        try:
            with contextlib.redirect_stdout(sys.stderr), progress:
                run_experiment(plan, progress=progress)
        finally:
            known |= progress.busy()
            write_atomically(notes, json.dumps(known, indent=1) + "\n")
        return [cell.cell_id for cell, _ in plan.cells], known


def _middle_rate(requests: Any) -> float:
    ends = (requests["due_ms"] + requests["e2e_ms"]).dropna().sort_values().to_numpy() / 1e3
    low, high = (round(share * (len(ends) - 1)) for share in MIDDLE)
    return (high - low) / float(ends[high] - ends[low])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tell(page: Page, found: Validation, measured: Measured, missing: Sequence[str]) -> list[str]:
    """Fill the page; returns the bounds that are missed. `missing`: groups that nobody measured yet."""
    names = {cell_id: loaded.name for cell_id, loaded in measured.cells.items()}
    rows = metric_rows(found.errors)
    page.say(*HEAD, "")
    page.section("Errors by metric", ERRORS, shown_metrics(rows))
    page.say(predicted_text(found.facts["predicted"]), "")
    worst = worst_cell(found)
    if worst is not None:
        text = worst_text(worst).replace(worst.cell_id, names[worst.cell_id])
        page.say(f"Worst cell: {text}", "")
    of_cells = [row | {"cell_id": names[row["cell_id"]]} for row in cell_rows(found.errors)]
    page.section("Errors by cell, %", cell_columns(), of_cells)
    rates = [{"name": name, "rate": rate} for name, rate in measured.capacities.items()]
    page.section("Capacity", CAPACITIES, rates)
    if missing:
        page.say(f"Not measured yet: {', '.join(missing)}.")
    for cell_id, share in measured.busy.items():
        page.say(f"Without a bound: {names[cell_id]}: others used {share:.0%} of the cores beside it.")
    for cell_id, why in found.facts["left_out"]:
        page.say(f"Left out: {names.get(cell_id, cell_id)}: {why}.")
    page.tables = {"errors": found.errors.to_dict("records"), "stages": found.stages.to_dict("records")}
    return [
        f"{row['title']}: half of the cells are within {row['median']:.1%}, bound {row['bound']:.0%}"
        for row in rows
        if row["is_missed"]
    ]


def main() -> int:
    return run(
        measure,
        __file__,
        title="Predictions against two cores",
        work=option(Path("runs/plan-validation"), "folder of the runs, continued if it is there"),
        part={
            "type": part,
            "default": "1/1",
            "metavar": "K/N",
            "help": "the Kth of N parts of the groups",
        },
        repeats=option(3, "of each cell"),
        only=option("", "points whose names hold this, such as 'llama x1 balanced'"),
        patience=option(120.0, "seconds to wait for a quiet machine, before each cell"),
        rounds=option(2, "of measuring cells again beside which others used the machine"),
        quick={
            "action": "store_true",
            "help": "12 cells of balanced traffic, coarser tables, steps beyond them extrapolated",
        },
        extrapolate={"action": "store_true", "help": "predict also what no table covers"},
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
