"""How far rayk's predictions are from what two cores do, in cells that no cost table was fitted to.

    python jobs/plan_validation.py [--quick] [--only NAME] [--part K/N] [--repeats 3] [--work DIR] [--record]

Needs a quiet machine. The folder --work is continued by another call, and holds:

    costs       what `rayk costs` measures of each model, and the tables fitted to it
    capacity    jobs/plan_validation.yaml, all prompts at once: requests per second in the middle of each cell
    cells       the same points at 0.5, 0.7, 0.85 and 0.95 of that, `--repeats` times each
    again-1...  cells beside which others used the machine, measured again
    validation  predictions beside measurements: report.html, and a run folder of what was predicted

Before each cell the job waits until the machine is quiet (--patience), and looks again after it. A cell that
never had a quiet machine is reported by name, without a bound; so are cells at 0.95. An answer is good if it
keeps 3 times the median TTFT and 1.5 times the median TPOT of its own point at the lightest load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from rayk.reports import Result, load
from rayk.reports.page import Column
from rayk.reports.trust import predicted_text
from rayk.reports.validation import Judged, Validation, metric_rows, worst_cell
from rayk.reports.validation_page import ERRORS, cell_columns, cell_rows, shown_metrics, worst_text
from rayk.specs import ExperimentSpec, load_spec
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
NOTES = "busy.json"
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
    rate: float  # requests per second

    @property
    def name(self) -> str:
        return f"{name_of(self.point)} at {self.share:g}"


def points(spec: ExperimentSpec) -> list[Point]:
    """List the points of a matrix, in the order of its cells."""
    return [
        dict(zip(matrix, values, strict=True))
        for matrix in spec.matrix
        for values in product(*matrix.values())
    ]


def configuration(point: Point) -> str:
    if point.get("mode") != "aggregated":
        return "P/D 1:1"
    tp = point.get("prefill.tp", 1)
    return f"TP {tp}" if tp > 1 else f"x{point.get('prefill.num_engines', 1)}"


def name_of(point: Point) -> str:
    """Name a point, e.g. `llama x2 balanced`."""
    model = Path(point["model"]).name.removeprefix("plan-")
    return f"{model} {configuration(point)} {TRAFFIC[point['sampling.max_tokens']]}"


def chosen(
    of: Sequence[Point], *, quick: bool, only: str, piece: tuple[int, int]
) -> Iterator[tuple[Point, Sequence[float]]]:
    """Yield the points of a part, and the rates of each."""
    kept: list[tuple[Point, Sequence[float]]] = []
    for point in (p for p in of if only in name_of(p)):
        if not quick:
            kept.append((point, RATES))
        elif TRAFFIC[point["sampling.max_tokens"]] == "balanced":
            kept.append((point, QUICK_RATES[configuration(point)]))
    number, parts = piece
    yield from kept[number - 1 :: parts]


def measure(asked: argparse.Namespace, page: Page) -> list[str]:
    job = _Job(asked)
    job.measure_costs()
    rates = job.capacities()
    wanted = [
        LoadedPoint(point=point, share=share, rate=round(share * rates[index], 3))
        for index, (point, of) in enumerate(job.points)
        for share in of
    ]
    measured = job.measure_cells(wanted)
    found = validate(
        ValidationPlan(
            runs=measured.runs,
            costs=job.costs,
            out=job.folder("validation"),
            judged=Judged(
                slos=measured.slos(),
                unbound={c for c, loaded in measured.cells.items() if loaded.share >= UNBOUND}
                | measured.busy.keys(),
            ),
            skipped=measured.skipped,
            extrapolate=asked.extrapolate or asked.quick,
        ),
        tell=lambda number, total, cell_id: _say(f"predicting {number + 1} of {total}: {cell_id}"),
    )
    named = [{"name": name_of(p), "rate": rate} for (p, _), rate in zip(job.points, rates, strict=True)]
    return tell(page, found, measured, named)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured, and beside what."""

    runs: list[Path]
    cells: dict[str, LoadedPoint]
    skipped: dict[tuple[str, str], str]
    """(run, cell) -> why a later run has the cell."""
    busy: dict[str, float]
    """Cells that never had a quiet machine."""

    def slos(self) -> dict[str, Slo]:
        """Limit each point's cells by the medians of its lightest load."""
        requests: dict[str, Any] = {}
        for folder in self.runs:  # a later run's cells replace an earlier one's
            requests |= dict(iter(load(folder).requests.groupby("cell_id", sort=False)))
        lightest: dict[str, str] = {}
        for cell_id, loaded in sorted(self.cells.items(), key=lambda item: item[1].share):
            lightest.setdefault(name_of(loaded.point), cell_id)
        limits = {}
        for name, cell_id in lightest.items():
            medians = requests[cell_id][["ttft_ms", "tpot_ms"]].median()
            limits[name] = Slo(
                limits_ms={
                    "ttft": round(TTFT_FACTOR * float(medians["ttft_ms"]), 1),
                    "tpot": round(TPOT_FACTOR * float(medians["tpot_ms"]), 2),
                }
            )
        return {cell_id: limits[name_of(loaded.point)] for cell_id, loaded in self.cells.items()}


class _Job:
    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._spec = load_spec(SPEC)
        self._base = self._spec.spec.model_dump(mode="json", exclude_unset=True)
        self.costs = self.folder("costs", of_part=False)
        self.points = list(
            chosen(points(self._spec.spec), quick=asked.quick, only=asked.only, piece=asked.part)
        )

    def folder(self, what: str, *, of_part: bool = True) -> Path:
        number, of = self._asked.part
        piece = f"-{number}-of-{of}" if of_part and of > 1 else ""
        found: Path = self._asked.work / f"{what}{'-quick' if self._asked.quick else ''}{piece}"
        return found

    def measure_costs(self) -> None:
        """Measure the models, and fit their tables."""
        all_points = [p for p in points(self._spec.spec) if self._asked.only in name_of(p)]
        kinds = {configuration(point) for point in all_points}
        plan_experiment(self._spec, self.folder("plan"), tell=_say)  # writes the checkpoints
        runs = []
        for model in dict.fromkeys(point["model"] for point in all_points):
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
            folder = self.costs / Path(model).name
            self._run(grid_spec(asked, read_config(config_file(model)[1])), folder)
            runs.append(read_run(folder))
        fitted = fit_runs(runs)
        for line in told(fitted):
            _say(line)
        fitted.book.save(self.costs)

    def capacities(self) -> list[float]:
        """Measure how many requests per second each point can take."""
        matrix = [{name: [value] for name, value in point.items()} for point, _ in self.points]
        ids, result, _ = self._run({**self._base, "matrix": matrix}, self.folder("capacity"))
        found = dict(iter(result.requests.groupby("cell_id", sort=False)))
        return [_middle_rate(found[cell_id]) for cell_id in ids]

    def measure_cells(self, wanted: Sequence[LoadedPoint]) -> Measured:
        """Measure all cells, then again those beside which others used the machine."""
        measured = Measured(runs=[], cells={}, skipped={}, busy={})
        left = list(wanted)
        for number in range(self._asked.rounds + 1):
            folder = self.folder(f"again-{number}" if number else "cells")
            matrix = [{n: [v] for n, v in p.point.items()} | {"arrival.rate": [p.rate]} for p in left]
            ids, _, noted = self._run({**self._base, "matrix": matrix, "repeat": self._asked.repeats}, folder)
            of_run = dict(zip(ids, left, strict=True))
            measured.runs.append(folder)
            measured.cells.update(of_run)
            busy = {cell: share for cell, share in noted.items() if cell in of_run}
            left = [of_run[cell] for cell in busy]
            if not left or number == self._asked.rounds:
                measured.busy.update(busy)
                break
            for cell, share in busy.items():
                measured.skipped[str(folder), cell] = f"measured again: others used {share:.0%} of the cores"
        return measured

    def _run(self, spec: Mapping[str, Any], folder: Path) -> tuple[list[str], Result, dict[str, float]]:
        """Run what is left of a spec. Returns the cells' ids in their order, the tables, and the cells beside
        which the machine was busy, in this call or an earlier one."""
        plan = plan_experiment(load_spec(spec, source=folder.name), folder, resume=True, tell=_say)
        notes = folder / NOTES
        known = parse_json(read_text(notes, NOTES_BYTES)) if notes.is_file() else {}
        progress = QuietProgress(RunProgress(), patience_s=self._asked.patience)
        try:
            with contextlib.redirect_stdout(sys.stderr), progress:
                result = run_experiment(plan, progress=progress)
        finally:
            known |= progress.busy()
            write_atomically(notes, json.dumps(known, indent=1) + "\n")
        return [cell.cell_id for cell, _ in plan.cells], result, known


def _middle_rate(requests: Any) -> float:
    ends = (requests["due_ms"] + requests["e2e_ms"]).dropna().sort_values().to_numpy() / 1e3
    low, high = (round(share * (len(ends) - 1)) for share in MIDDLE)
    return (high - low) / float(ends[high] - ends[low])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tell(page: Page, found: Validation, measured: Measured, capacities: list[dict[str, Any]]) -> list[str]:
    """Fill the page; returns the bounds that are missed."""
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
    page.section("Capacity", CAPACITIES, capacities)
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
            "help": "the Kth of N parts of the points",
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
