"""Read a run back from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rayk.reports.columns import FIELDS
from rayk.reports.files import TABLES, read_spec
from rayk.reports.folder import read_environment
from rayk.reports.load_fields import LOAD_FIELDS, is_load
from rayk.reports.moves import moves
from rayk.reports.pending import joined, read_pending
from rayk.reports.schema import MEASURED_STAGES, SCHEMA_VERSION, check_schema
from rayk.types.errors import UserError
from rayk.types.rows import CellRow


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds three tables: a row per cell, per request and per transfer; columns as INTERFACE names them."""

    cells: pd.DataFrame
    requests: pd.DataFrame
    transfers: pd.DataFrame
    environment: dict[str, Any] = field(default_factory=dict)
    spec_yaml: str = ""
    directory: Path | None = None
    schema_version: int = SCHEMA_VERSION  # the lowest of the tables on disk; see `schema.py`
    # table -> columns that the writing rayk did not have: they hold nothing
    lacking: dict[str, tuple[str, ...]] = field(default_factory=dict)
    derived: dict[str, pd.DataFrame] = field(default_factory=dict, init=False, repr=False)  # see derived.py

    @property
    def num_missing(self) -> int:
        """Count planned cells that have not ended; 0 where nobody noted how many were planned."""
        planned = self.environment.get("cells")
        return max(0, planned - len(self.cells)) if isinstance(planned, int) else 0

    @property
    def age_note(self) -> str:
        """Say what an older rayk did not write; empty where the tables have every column."""
        told = [f"{table} {', '.join(names)}" for table, names in self.lacking.items()]
        if not told:
            return ""
        version = f"tables of version {self.schema_version}, now {SCHEMA_VERSION}; "
        version = version if self.schema_version < SCHEMA_VERSION else ""
        return f"written by an older rayk ({version}columns that hold nothing: {'; '.join(told)})"


def load(directory: str | Path) -> Result:
    """Read the tables of a run's finished cells. Columns that an older rayk did not write hold nothing
    (`Result.lacking`). Raises UserError without tables, or for tables that this rayk cannot read."""
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(problem="no such run folder", where=str(folder))
    missing = [f"{name}.parquet" for name in TABLES if not (folder / f"{name}.parquet").is_file()]
    spec = folder / "spec.yaml"
    if missing:
        started = spec.is_file() and "cells.parquet" in missing
        raise UserError(
            problem=f"not a run's folder: no {', '.join(missing)}",
            where=str(folder),
            mend="no cell of this run is finished: `rayk run ... --resume`"
            if started
            else "a folder that `rayk run --out` wrote",
        )
    # Cells that wait first, then those of the table: a run that writes only moves them there, and the other
    # tables hold at least the rows of the cells just read.
    pending = read_pending(folder)
    paths = {name: folder / f"{name}.parquet" for name in TABLES}
    versions = [_check(path) for path in paths.values()]
    tables = {name: _read(path) for name, path in paths.items()}
    tables = joined(tables, pending) if pending else tables
    read = {name: table.to_pandas() for name, table in tables.items()}
    lacking = _lacking(read)
    cells, requests, transfers = (_complete(name, read[name]) for name in TABLES)
    if min(versions) < MEASURED_STAGES and "transfer_gb_per_s" in read["cells"]:
        cells["transfer_gb_per_s"] = _rates(cells, requests, transfers)
    return Result(
        cells=cells,
        requests=_of(cells, requests),
        transfers=_of(cells, transfers),
        environment=read_environment(folder),
        spec_yaml=read_spec(spec),
        directory=folder,
        schema_version=min(versions),
        lacking=lacking,
    )


def _rates(cells: pd.DataFrame, requests: pd.DataFrame, transfers: pd.DataFrame) -> pd.Series[float]:
    """Compute each cell's bytes over its requests' times: older tables hold another rate."""
    sums = moves(requests, transfers).groupby("cell_id")[["bytes", "moving_ms"]].sum()
    rates: pd.Series[float] = cells["cell_id"].map(sums["bytes"] / sums["moving_ms"] / 1e6)
    return rates.astype("float64")


def _check(path: Path) -> int:
    try:
        return check_schema(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(problem=f"cannot read the table: {error}", where=str(path)) from error


def _lacking(read: Mapping[str, pd.DataFrame]) -> dict[str, tuple[str, ...]]:
    loads = "verdict" in read["cells"] and is_load(read["cells"])
    expected = FIELDS | LOAD_FIELDS if loads else FIELDS
    found = {name: tuple(c for c in expected[name] if c not in table) for name, table in read.items()}
    return {name: columns for name, columns in found.items() if columns}


def _of(cells: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Drop rows of a cell that was in flight when its driver was killed."""
    return rows[rows["cell_id"].isin(cells["cell_id"])].reset_index(drop=True)


def _complete(name: str, table: pd.DataFrame) -> pd.DataFrame:
    lacking = [column for column in FIELDS[name] if column not in table]
    nothing = {c: pa.nulls(len(table), FIELDS[name][c]).to_pandas().set_axis(table.index) for c in lacking}
    if nothing:
        # All at once: pandas warns of tables that got a hundred columns one by one.
        table = pd.concat([table, pd.DataFrame(nothing)], axis=1)
    if "expected_verdict" in lacking:
        table["expected_verdict"] = "PASS"
    if "met" in lacking:
        pairs = zip(table["verdict"], table["expected_verdict"], strict=True)
        rows = [CellRow(cell_id="", axes={}, verdict=v, expected_verdict=e) for v, e in pairs]
        table["met"] = [row.met for row in rows]
    return table


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(problem=f"cannot read the table: {error}", where=str(path)) from error
