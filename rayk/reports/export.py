"""Share between exporters a cell's requests, their statistics, and where files go. `aiperf.py` and `llmd.py`
put the numbers into other tools' words; what the tables do not know they leave out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.columns import CELL_FIELDS
from rayk.reports.files import make_folder, parse_spec, write_text
from rayk.reports.load_fields import LOAD_CELL_FIELDS, is_load
from rayk.reports.result import Result
from rayk.reports.values import is_null, parsed

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
MS_PER_S = 1e3


@dataclass(frozen=True, kw_only=True)
class CellExport:
    index: int
    cell: Mapping[str, Any]  # its row of cells.parquet; what is null is not in it
    is_load: bool
    answered: pd.DataFrame
    """Holds a load's measured requests; failed ones are in `failed` alone."""
    failed: pd.DataFrame
    warmup: pd.DataFrame  # a load's answered requests before the measured ones
    environment: Mapping[str, Any]
    spec: Mapping[str, Any]

    @property
    def version(self) -> str:
        return str((self.environment.get("packages") or {}).get("rayk") or "unknown")

    @property
    def axes(self) -> dict[str, Any]:
        own = ("arrival", "rate", "concurrency", "burstiness", "slo")
        if self.is_load:
            return {name: self.cell[name] for name in own if name in self.cell}
        return {
            name: parsed(v) for name, v in self.cell.items() if name not in CELL_FIELDS | LOAD_CELL_FIELDS
        }

    def setting(self, key: str) -> Any:
        """Look up a dotted key among the cell's axes, then in the spec; None where neither has it."""
        if key in self.axes:
            return self.axes[key]
        value: Any = self.spec
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def model(self) -> str:
        return str(self.cell.get("model") or self.setting("model") or "unknown")

    def output_tokens(self, rows: pd.DataFrame) -> pd.Series[float]:
        if self.is_load:
            return rows["num_output_tokens"].astype(float)
        return rows["output_token_ids"].map(len, na_action="ignore").astype(float)

    def span_s(self) -> float:
        """Add up over repeats the time from the first request sent to the end of the last; 0 where due times
        are unknown."""
        total = 0.0
        for _, rows in self.answered.groupby("repeat"):
            sent_ms = (rows["due_ms"] + send_lag_ms(rows)).min()
            total += float((rows["due_ms"] + rows["e2e_ms"]).max() - sent_ms)
        return total / MS_PER_S if total > 0 else 0.0


def send_lag_ms(rows: pd.DataFrame) -> pd.Series[float]:
    """Say how late each request left; a run's requests leave when they are due."""
    return rows.get("send_lag_ms", pd.Series(0.0, index=rows.index))


def cell_exports(result: Result) -> Iterator[CellExport]:
    spec = parse_spec(result.spec_yaml)
    loads = is_load(result.cells)
    by_cell = dict(list(result.requests.groupby("cell_id", sort=False)))
    for index, record in enumerate(result.cells.to_dict(orient="records")):
        rows = by_cell.get(record["cell_id"], result.requests.iloc[:0])
        ok = (rows["outcome"] == "ok") if loads else (rows["error"].isna() & rows["e2e_ms"].notna())
        phase = rows["phase"] if loads else pd.Series("measured", index=rows.index)
        if not (ok & (phase == "measured")).any():
            continue
        yield CellExport(
            index=index,
            cell={str(k): v for k, v in record.items() if not is_null(v)},
            is_load=loads,
            answered=rows[ok & (phase == "measured")],
            failed=rows[~ok & (phase == "measured")],
            warmup=rows[ok & (phase == "warmup")],
            environment=result.environment,
            spec=_of_load(spec, index) if loads else spec,
        )


def _of_load(spec: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    loads = spec.get("loads") or []
    return dict(loads[index]) if index < len(loads) else {}


def numbers(values: Sequence[Any] | pd.Series[Any]) -> list[float]:
    return [float(v) for v in values if not is_null(v)]


def statistics(values: Sequence[float]) -> dict[str, float] | None:
    """Compute mean, stddev (of the values), min, max, p1 to p99 (linear), count and sum; None of no
    values."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    percentiles = np.percentile(array, PERCENTILES)
    told = {f"p{p}": float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)}
    ends = {"mean": array.mean(), "stddev": array.std(), "min": array.min(), "max": array.max()}
    return {**{k: float(v) for k, v in ends.items()}, **told, "count": len(values), "sum": float(array.sum())}


def without_nothing(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


def folder_name(cell_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=,+-]+", "_", cell_id).strip("._") or "cell"


def write_exports(
    result: Result, folder: Path, file_name: str, render: Callable[[CellExport], str]
) -> list[Path]:
    paths: list[Path] = []
    for export in cell_exports(result):
        name = folder_name(str(export.cell["cell_id"]))
        if any(path.parent.name == name for path in paths):
            name = f"{name}-{export.index}"
        make_folder(folder / name)
        write_text(folder / name / file_name, render(export))
        paths.append(folder / name / file_name)
    return paths
