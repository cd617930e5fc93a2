"""Hold predicted runs against measured ones, cell by cell: signed errors, never of E2E alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rayk.reports.achieved import ACHIEVEMENTS, by_repeat, mean_of, with_counts
from rayk.reports.files import atomic_path, make_folder, write_text
from rayk.reports.result import Result
from rayk.reports.stages import PARTS, request_parts
from rayk.types.errors import UserError
from rayk.types.files import JSON_BYTES, parse_json, read_text
from rayk.types.slo import Slo

BOUNDS = {
    "tpot_ms_p50": 0.08,
    "tpot_ms_p90": 0.08,
    "output_tokens_per_s": 0.08,
    "ttft_ms_p50": 0.15,
    "goodput_per_s": 0.15,
}
"""The most by which half of the cells may be off, as shares of the measured."""
FIRST_STAGES = ("queue", "dispatch", "lookup", "load", "prefill_queue", "prefill")
"""Those that end with the first token."""
TABLE, STAGE_TABLE, FACTS = "validation.parquet", "validation_stages.parquet", "validation.json"
COLUMNS = {
    "run": pa.string(),
    "cell_id": pa.string(),
    "metric": pa.string(),  # a name of ACHIEVEMENTS
    "unit": pa.string(),
    "num_repeats": pa.int64(),
    "measured": pa.float64(),  # means over repeats
    "predicted": pa.float64(),
    "error": pa.float64(),  # predicted by measured, less 1
    "spread": pa.float64(),  # half the range of the repeats' own errors
    "measured_spread": pa.float64(),  # half the range of the measured values
    "bound": pa.float64(),  # null: the cell is reported without one
    "is_missed": pa.bool_(),  # off by more than the bound, and than twice the spread
    "was_fitted": pa.bool_(),  # the cost tables were fitted to this very cell
    "slo": pa.string(),
}
STAGE_COLUMNS = {
    "run": pa.string(),
    "cell_id": pa.string(),
    "stage": pa.string(),
    "measured_ms": pa.float64(),  # means over requests
    "predicted_ms": pa.float64(),
}


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Predictions beside measurements: a row per cell and metric (COLUMNS), and per cell and stage."""

    errors: pd.DataFrame
    stages: pd.DataFrame
    facts: Mapping[str, Any] = field(default_factory=dict)
    """`costs`, `unmeasured`, `outside_hull` (steps), `runs` (folder of a measured run -> of its prediction),
    `left_out` (cell, why), `environment`; `not_noted`, why it could not be kept with the tables, if so."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """How the cells are judged."""

    slos: Mapping[str, Slo] | Slo = field(default_factory=Slo)
    """What a good answer keeps, of all cells or by cell id."""
    unbound: Collection[str] = ()
    """Cells that are reported without a bound."""
    fitted: Collection[str] = ()
    """Cells to which the cost tables were fitted."""

    def slo_of(self, cell_id: str) -> Slo:
        return self.slos if isinstance(self.slos, Slo) else self.slos.get(cell_id, Slo())


def compare_run(measured: Result, predicted: Result, judged: Judged) -> Validation:
    """Compare the cells that both runs have."""
    run = str(measured.directory or "")
    sides = [
        dict(iter(with_counts(r.requests).groupby("cell_id", sort=False))) for r in (measured, predicted)
    ]
    cells = [cell_id for cell_id in measured.cells["cell_id"] if all(cell_id in side for side in sides)]
    errors = [
        row
        for cell_id in cells
        for row in _cell_errors(run, cell_id, sides[0][cell_id], sides[1][cell_id], judged)
    ]
    stages = [
        row
        for cell_id in cells
        for row in _cell_stages(run, cell_id, request_parts(measured), request_parts(predicted))
    ]
    return Validation(
        errors=pd.DataFrame(errors, columns=list(COLUMNS)),
        stages=pd.DataFrame(stages, columns=list(STAGE_COLUMNS)),
    )


def joined_validations(found: Sequence[Validation], facts: Mapping[str, Any]) -> Validation:
    """Put the cells of several runs into one validation."""
    return Validation(
        errors=pd.concat([v.errors for v in found], ignore_index=True),
        stages=pd.concat([v.stages for v in found], ignore_index=True),
        facts=facts,
    )


def _cell_errors(
    run: str, cell_id: str, measured: pd.DataFrame, predicted: pd.DataFrame, judged: Judged
) -> list[dict[str, Any]]:
    slo = judged.slo_of(cell_id)
    real, made = by_repeat(measured, slo), by_repeat(predicted, slo)
    common = sorted(real.keys() & made.keys())
    real, made = ({repeat: side[repeat] for repeat in common} for side in (real, made))
    means, predictions = mean_of(real), mean_of(made)
    rows = []
    for kind in ACHIEVEMENTS if common else ():
        name = kind.name
        error = share_off(predictions[name], means[name])
        spread = _half_range([share_off(made[r][name], real[r][name]) for r in common])
        bound = None if cell_id in judged.unbound else BOUNDS.get(name)
        rows.append(
            {
                "run": run,
                "cell_id": cell_id,
                "metric": name,
                "unit": kind.unit,
                "num_repeats": len(common),
                "measured": means[name],
                "predicted": predictions[name],
                "error": error,
                "spread": spread,
                "measured_spread": _half_range([real[r][name] for r in common]),
                "bound": bound,
                "is_missed": bound is not None and _misses(error, spread, bound),
                "was_fitted": cell_id in judged.fitted,
                "slo": str(slo),
            }
        )
    return rows


def share_off(predicted: float, measured: float) -> float:
    """Return by what share of the measured a prediction is off; NaN where nothing was measured, but 0 where
    nothing was predicted either."""
    if measured == predicted == 0:
        return 0.0
    return predicted / measured - 1 if measured else float("nan")


def _misses(error: float, spread: float, bound: float) -> bool:
    return abs(error) > max(bound, 2 * (0.0 if np.isnan(spread) else spread))


def _half_range(values: Sequence[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return (max(known) - min(known)) / 2 if known else float("nan")


def _cell_stages(
    run: str, cell_id: str, measured: pd.DataFrame, predicted: pd.DataFrame
) -> list[dict[str, Any]]:
    names = [part.name for part in PARTS]
    real, made = (parts.loc[parts["cell_id"] == cell_id, names].mean() for parts in (measured, predicted))
    return [
        {
            "run": run,
            "cell_id": cell_id,
            "stage": name,
            "measured_ms": float(real[name]),
            "predicted_ms": float(made[name]),
        }
        for name in names
        if real[name] > 0 or made[name] > 0
    ]


# --- over cells -----------------------------------------------------------------------------------


def metric_rows(errors: pd.DataFrame) -> list[dict[str, Any]]:
    """Sum up each metric over the cells that count: those with a bound, of metrics without any all, less
    those that were fitted. Taus are over all cells. `is_unsure`: off by more than the bound, and by no more
    than repeats differ."""
    rows = []
    for kind in ACHIEVEMENTS:
        of_metric = errors[errors["metric"] == kind.name]
        counted = _counted(of_metric, kind.name)
        off = counted["error"].abs()
        bound = BOUNDS.get(kind.name)
        median, spread = float(off.median()), float(counted["spread"].median())
        worst = _furthest(counted, off)
        rows.append(
            {
                "metric": kind.name,
                "title": kind.title,
                "num_cells": int(off.notna().sum()),
                "median": median,
                "signed": float(counted["error"].median()),
                "p90": float(off.quantile(0.9)),
                "spread": spread,
                "bound": bound,
                "is_missed": bound is not None and _misses(median, spread, bound),
                "is_unsure": bound is not None and bound < median and not _misses(median, spread, bound),
                "num_missed": int(counted["is_missed"].sum()),
                "worst": None if worst is None else float(worst["error"]),
                "worst_cell": "" if worst is None else str(worst["cell_id"]),
                "tau": kendall_tau(of_metric["measured"], of_metric["predicted"]),
                "tau_apart": kendall_tau(
                    of_metric["measured"], of_metric["predicted"], noise=of_metric["measured_spread"]
                ),
            }
        )
    return rows


def within_text(num_cells: int, within: Mapping[str, float], date: str) -> str:
    """Say in words what metric_rows found, e.g. for a plan that rests on the same tables."""
    titles = {kind.name: kind.title for kind in ACHIEVEMENTS}
    told = ", ".join(f"{share:.1%} ({titles[name]})" for name, share in within.items() if name in titles)
    return f"half of {num_cells:,} cells were off by at most {told}" + (f", on {date}" if date else "")


def _furthest(frame: pd.DataFrame, by: pd.Series[float]) -> dict[str, Any] | None:
    """Return the first row at the largest number; None without any number."""
    if not by.notna().any():
        return None
    return {str(k): v for k, v in frame.iloc[int(np.nanargmax(by.to_numpy(float)))].to_dict().items()}


def _counted(of_metric: pd.DataFrame, name: str) -> pd.DataFrame:
    own = of_metric[~of_metric["was_fitted"]]
    return own[own["bound"].notna()] if name in BOUNDS else own


def kendall_tau(
    first: Sequence[float] | pd.Series[float],
    second: Sequence[float] | pd.Series[float],
    *,
    noise: Sequence[float] | pd.Series[float] | None = None,
) -> float:
    """Compute Kendall's tau-b: 1 where both rank all alike, -1 where in reverse; NaN where one has no order.
    `noise` of each of the first: pairs no further apart than both noises together do not count, and ties of
    the second count as half wrong. Kendall, "The treatment of ties in ranking problems", 1945."""
    x, y = (np.asarray(values, dtype=float) for values in (first, second))
    known = ~(np.isnan(x) | np.isnan(y))
    x, y = x[known], y[known]
    above = np.triu_indices(len(x), 1)
    dx, dy = (np.subtract.outer(v, v)[above] for v in (x, y))
    if noise is not None:
        wide = np.nan_to_num(np.asarray(noise, dtype=float)[known])
        apart = np.abs(dx) > np.add.outer(wide, wide)[above]
        agreed = np.sign(dx[apart]) * np.sign(dy[apart])
        return float(agreed.mean()) if len(agreed) else float("nan")
    pairs = np.sqrt(float(np.count_nonzero(dx)) * float(np.count_nonzero(dy)))
    return float(np.sum(np.sign(dx) * np.sign(dy)) / pairs) if pairs else float("nan")


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The cell whose prediction is furthest off, by its bound, and the stage that says why."""

    run: str
    cell_id: str
    metric: str
    error: float
    bound: float
    stage: str
    measured_ms: float
    predicted_ms: float
    measured_share: float  # of all stages
    predicted_share: float


def worst_cell(found: Validation) -> Worst | None:
    """Find it among the cells that count; None without any."""
    errors = found.errors
    counted = errors[errors["bound"].notna() & ~errors["was_fitted"] & errors["error"].notna()]
    if counted.empty:
        return None
    row = _furthest(counted, counted["error"].abs() / counted["bound"])
    assert row is not None
    stage = stage_off(found.stages, str(row["run"]), str(row["cell_id"]), str(row["metric"]))
    return Worst(
        run=str(row["run"]),
        cell_id=str(row["cell_id"]),
        metric=str(row["metric"]),
        error=float(row["error"]),
        bound=float(row["bound"]),
        **stage,
    )


def stage_off(stages: pd.DataFrame, run: str, cell_id: str, metric: str) -> dict[str, Any]:
    """Name the stage of a cell whose measured and predicted shares of all stages differ most, among those
    that the metric is made of."""
    of_cell = stages[(stages["run"] == run) & (stages["cell_id"] == cell_id)]
    shares = of_cell.assign(
        measured_share=of_cell["measured_ms"] / of_cell["measured_ms"].sum(),
        predicted_share=of_cell["predicted_ms"] / of_cell["predicted_ms"].sum(),
    )
    if shares.empty:
        numbers = ("measured_ms", "predicted_ms", "measured_share", "predicted_share")
        return {"stage": "", **dict.fromkeys(numbers, float("nan"))}
    is_first = shares["stage"].isin(FIRST_STAGES)
    own = {"ttft": shares[is_first], "tpot": shares[~is_first]}.get(metric.partition("_")[0], shares)
    row = _furthest(own, (own["predicted_share"] - own["measured_share"]).abs())
    row = row or _furthest(shares, shares["measured_share"])
    assert row is not None
    return {
        name: row[name] if name == "stage" else float(row[name])
        for name in ("stage", "measured_ms", "predicted_ms", "measured_share", "predicted_share")
    }


# --- on disk --------------------------------------------------------------------------------------


def write_validation(found: Validation, folder: str | Path) -> None:
    """Write the tables and the facts."""
    folder = Path(folder)
    make_folder(folder)
    for name, frame, columns in (
        (STAGE_TABLE, found.stages, STAGE_COLUMNS),
        (TABLE, found.errors, COLUMNS),
    ):
        table = pa.Table.from_pandas(frame, schema=pa.schema(columns), preserve_index=False)
        with atomic_path(folder / name) as path:
            pq.write_table(table, path)
    write_text(folder / FACTS, json.dumps({"version": 1, **found.facts}, indent=1, default=str) + "\n")


def is_validation(folder: str | Path) -> bool:
    return (Path(folder) / TABLE).is_file()


def read_validation(folder: str | Path) -> Validation:
    """Read what `write_validation` wrote. Raises UserError."""
    folder = Path(folder)
    try:
        errors, stages = (pq.read_table(folder / name).to_pandas() for name in (TABLE, STAGE_TABLE))
        facts = parse_json(read_text(folder / FACTS, JSON_BYTES))
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(problem=f"not a validation's folder: {error}", where=str(folder)) from error
    if not isinstance(facts, dict) or not set(COLUMNS) <= set(errors):
        raise UserError(problem="not a validation's tables", where=str(folder))
    return Validation(errors=errors, stages=stages, facts=facts)
