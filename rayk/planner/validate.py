"""Predict the cells of runs that were measured, and hold the predictions against them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayk.costs.book import CostBook, Validated, note_validation
from rayk.models.config import DecoderConfig
from rayk.planner.drafts import request_rates
from rayk.planner.recorded import Row, planned_cells
from rayk.reports import Result, ResultWriter, load
from rayk.reports.folder import read_environment
from rayk.reports.report import write_html
from rayk.reports.validation import (
    Judged,
    Validation,
    compare_run,
    joined_validations,
    metric_rows,
    write_validation,
)
from rayk.reports.values import is_null
from rayk.simulate.arrivals import Arrival, cell_arrivals
from rayk.simulate.outcome import SimOutcome, cell_row, prediction_facts
from rayk.simulate.run import simulate_cell, why_not_simulated
from rayk.specs import Cell
from rayk.types.errors import OutsideHull, UserError

PREDICTED = "predicted"  # folder of the predicted runs, below that of a validation

Told = Callable[[int, int, str], object]
"""Hears of each cell: its number from 0, how many there are, its id."""


@dataclass(frozen=True, kw_only=True)
class ValidationPlan:
    """What is held against what, and how."""

    runs: Sequence[Path]
    costs: Path
    out: Path
    """Folder of the validation: its tables, page, and a run folder of each prediction."""
    judged: Judged = field(default_factory=Judged)
    include_fitted: bool = False
    extrapolate: bool = False
    skipped: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(run, cell) -> why it is left out."""
    noise: bool = False
    """Whether steps and gaps vary as those measured did; else each takes its mean or median."""


def validate(plan: ValidationPlan, *, tell: Told | None = None) -> Validation:
    """Predict every cell of the runs that can be predicted, from its own spec, prompts, arrivals and lengths
    of answers, and write a validation to `plan.out`.

    A cell that did not end well, or is not simulated, or needs steps that nobody measured, is left out and
    named. Raises UserError for cells that the tables were fitted to (unless `include_fitted`), and where
    nothing is left.
    """
    book = CostBook.load(plan.costs)
    results = [load(run) for run in plan.runs]
    fitted = _fitted(results, book, plan)
    total = sum(len(result.cells) for result in results)
    found, runs, left_out, outcomes = [], {}, [], []
    number = 0
    for result, name in zip(results, _names(plan.runs), strict=True):
        prediction = _Prediction(result, book, plan)
        for cell_id in result.cells["cell_id"]:
            if tell is not None:
                tell(number, total, cell_id)
            number += 1
            prediction.add(cell_id)
        left_out += prediction.left_out
        if prediction.cells:
            folder = prediction.write(plan.out / PREDICTED / name)
            runs[str(result.directory)] = str(folder.relative_to(plan.out))
            outcomes += [outcome for _, of_cell in prediction.cells for outcome in of_cell]
            found.append(compare_run(result, load(folder), replace(plan.judged, fitted=fitted)))
    if not found:
        whys = "; ".join(f"{cell_id}: {why}" for cell_id, why in left_out[:3])
        raise UserError(f"no cell can be predicted: {whys}", where=", ".join(map(str, plan.runs)))
    facts: dict[str, Any] = prediction_facts(book, outcomes, noise=plan.noise) | {
        "runs": runs,
        "left_out": left_out,
        "provenance": _provenance(book),
        "environment": results[0].environment,
    }
    validation = joined_validations(found, facts)
    try:
        note_validation(plan.costs, _validated(validation, results[0], plan.out))
    except OSError as error:  # tables may lie where nobody may write
        facts["not_noted"] = error.strerror or str(error)
    write_validation(validation, plan.out)
    write_html(plan.out)
    return validation


def _fitted(results: Sequence[Result], book: CostBook, plan: ValidationPlan) -> frozenset[str]:
    """Return the cells that the tables were fitted to. Raises UserError unless they are wanted."""
    known = set(book.provenance.cells)
    found = [cell_id for result in results for cell_id in result.cells["cell_id"] if cell_id in known]
    if found and not plan.include_fitted:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise UserError(
            f"the tables were fitted to {', '.join(found[:3])}{more}: no test of them",
            where=str(plan.costs),
            mend="runs that were not fitted, or --include-fitted, which marks these cells",
        )
    return frozenset(found)


def _names(runs: Sequence[Path]) -> Iterator[str]:
    """Name each run's prediction, no two alike."""
    seen: dict[str, int] = {}
    for run in runs:
        name = run.resolve().name
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"


class _Prediction:
    """The prediction of one run, cell by cell."""

    def __init__(self, measured: Result, book: CostBook, plan: ValidationPlan) -> None:
        self.cells: list[tuple[Cell, list[SimOutcome]]] = []
        self.left_out: list[tuple[str, str]] = []
        self._measured, self._book, self._plan = measured, book, plan
        self._planned = planned_cells(measured)
        self._rows = {row["cell_id"]: row for row in measured.cells.to_dict("records")}
        self._requests: dict[str, list[Row]] = {name: [] for name in self._rows}
        for row in measured.requests.to_dict("records"):
            self._requests[row["cell_id"]].append(row)

    def add(self, cell_id: str) -> None:
        """Predict a cell, or note why it is left out."""
        row = self._rows[cell_id]
        if cell_id not in self._planned:
            self.left_out.append((cell_id, "the run's own spec has no such cell"))
            return
        cell, config = self._planned[cell_id]
        requests = self._requests[cell_id]
        why = self._plan.skipped.get((str(self._measured.directory), cell_id)) or why_not_simulated(cell)
        if not row["met"] or row["verdict"] == "UNSUPPORTED":
            why = f"it ended as {row['verdict']}"
        elif why is None and all(is_null(request["e2e_ms"]) for request in requests):
            why = "no request was answered"
        elif why is None:
            why = self._why_no_drafts(cell, config)
        if why is None:
            try:
                self.cells.append((cell, self._simulated(cell, config, requests)))
            except OutsideHull as error:
                why = error.problem
        if why is not None:
            self.left_out.append((cell_id, why))

    def _why_no_drafts(self, cell: Cell, config: DecoderConfig) -> str | None:
        """Say what the tables lack of drafts; None: nothing that the cell needs."""
        for engine in cell.engines:
            if engine.speculative is not None:
                try:
                    self._book.of_engine(config, engine)
                except UserError as error:
                    return error.problem
        return None

    def _simulated(self, cell: Cell, config: DecoderConfig, requests: Sequence[Row]) -> list[SimOutcome]:
        book = paced_book(self._book, cell)
        run = partial(
            simulate_cell,
            cell,
            config,
            costs=book,
            noise=self._plan.noise,
            strict=not self._plan.extrapolate,
        )
        by_repeat: dict[int, list[Row]] = {}
        for row in requests:
            by_repeat.setdefault(int(row["repeat"]), []).append(row)
        return [
            run(arrivals=measured_arrivals(cell, rows), repeat=repeat, seed=repeat)
            for repeat, rows in sorted(by_repeat.items())
        ]

    def write(self, folder: Path) -> Path:
        """Write the predicted run, whose cells have the names of those measured, in place of an earlier
        prediction."""
        if "predicted" in read_environment(folder):
            shutil.rmtree(folder)
        measured = self._measured.environment
        environment = prediction_facts(
            self._book, [outcome for _, of_cell in self.cells for outcome in of_cell], noise=self._plan.noise
        ) | {
            name: measured[name] for name in ("devices", "packages", "platform", "python") if name in measured
        }
        writer = ResultWriter(folder, spec_yaml=self._measured.spec_yaml, environment=environment)
        for cell, outcomes in self.cells:
            writer.write_cell(
                cell_row(cell, outcomes),
                [row for outcome in outcomes for row in outcome.requests],
                [row for outcome in outcomes for row in outcome.transfers],
                [row for outcome in outcomes for row in outcome.steps],
            )
        writer.finish()
        writer.close()
        return folder


def paced_book(book: CostBook, cell: Cell) -> CostBook:
    """Slow the tables down as a cell's paced engines are, which take no cores; those of engines that compute
    stay."""
    engine = cell.spec.engine
    if engine.compute != "paced":
        return book
    engines = {key: costs.scaled(engine.pace) for key, costs in book.engines.items()}
    whole = book.any_engine
    return replace(
        book,
        engines=engines,
        any_engine=None if whole is None else whole.scaled(engine.pace),
        host=replace(book.host, num_cores=0),
    )


def measured_arrivals(cell: Cell, requests: Sequence[Row]) -> Iterator[Arrival]:
    """Yield the requests of one repeat as they were: due when they were due, each answer as long as it was
    and its drafts as often right. One that failed may go on to its limit."""
    rows = sorted(requests, key=lambda row: int(row["prompt_index"]))
    drafts = any(engine.speculative is not None for engine in cell.engines)
    return cell_arrivals(
        cell,
        [row["prompt_token_ids"].tolist() for row in rows],
        num_output_tokens=[_length(row, cell.sampling.max_tokens) for row in rows],
        due_ns=[round(row["due_ms"] * 1e6) for row in rows],
        drafts=[request_rates(row) for row in rows] if drafts else None,
    )


def _length(row: Row, limit: int) -> int:
    is_whole = is_null(row["error"]) and len(row["output_token_ids"])
    return len(row["output_token_ids"]) if is_whole else limit


def _validated(found: Validation, measured: Result, out: Path) -> Validated:
    """Sum up for plans how far the tables are off, in cells that count."""
    rows = [row for row in metric_rows(found.errors) if row["bound"] is not None and row["num_cells"]]
    return Validated(
        num_cells=max((row["num_cells"] for row in rows), default=0),
        within={row["metric"]: row["median"] for row in rows},
        date=str(measured.environment.get("started", ""))[:10],
        folder=str(out),
    )


def _provenance(book: CostBook) -> dict[str, Any]:
    about = book.provenance
    return {
        "machine": about.machine,
        "cpu": about.cpu,
        "cores": about.num_cores,
        "commit": about.commit,
        "date": about.date,
        "runs": list(about.runs),
        "fitted cells": len(about.cells),
    }
