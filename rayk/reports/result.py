"""A run read back from its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from rayk.reports.columns import FIELDS
from rayk.reports.files import TABLES
from rayk.reports.folder import read_environment
from rayk.types.errors import UserError
from rayk.types.rows import CellRow


@dataclass(frozen=True, kw_only=True)
class Result:
    """Three tables, one row per cell, per request and per transfer; columns as INTERFACE names them."""

    cells: pd.DataFrame
    requests: pd.DataFrame
    transfers: pd.DataFrame
    environment: dict[str, Any] = field(default_factory=dict)
    spec_yaml: str = ""
    directory: Path | None = None


def load(directory: str | Path) -> Result:
    """Read a run's tables, as far as its cells are finished. Raises UserError when the folder has none.

    Columns that an older rayk did not write are there and hold nothing; whether its cells were met follows
    from their verdicts.
    """
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
    # Cells first: while a run writes, the other tables hold at least the rows of the cells just read.
    cells, requests, transfers = (_complete(name, _read(folder / f"{name}.parquet")) for name in TABLES)
    return Result(
        cells=cells,
        requests=_of(cells, requests),
        transfers=_of(cells, transfers),
        environment=read_environment(folder),
        spec_yaml=spec.read_text(encoding="utf-8") if spec.is_file() else "",
        directory=folder,
    )


def _of(cells: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows of a cell that was in flight when its driver was killed."""
    return rows[rows["cell_id"].isin(cells["cell_id"])].reset_index(drop=True)


def _complete(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """The table with every column that runs have by now."""
    lacking = [column for column in FIELDS[name] if column not in table]
    nothing = {c: pa.nulls(len(table), FIELDS[name][c]).to_pandas().set_axis(table.index) for c in lacking}
    table = table.assign(**nothing)
    if "expected_verdict" in lacking:
        table["expected_verdict"] = "PASS"
    if "met" in lacking:
        pairs = zip(table["verdict"], table["expected_verdict"], strict=True)
        rows = [CellRow(cell_id="", axes={}, verdict=v, expected_verdict=e) for v, e in pairs]
        table["met"] = [row.met for row in rows]
    return table


def _read(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(problem=f"cannot read the table: {error}", where=str(path)) from error
