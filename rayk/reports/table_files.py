"""Write tables as files of their own: a run's as CSV, and those of jobs that are no experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.files import STEPS, TABLES, atomic_path, make_folder
from rayk.reports.result import Result
from rayk.reports.steps import read_steps
from rayk.types.errors import UserError


def write_csv(result: Result, directory: Path) -> list[Path]:
    """Write cells.csv, requests.csv and transfers.csv, and steps.csv of a run whose engines recorded them;
    lists and structs are JSON texts."""
    paths = []
    tables = {name: getattr(result, name) for name in TABLES}
    steps = None if result.directory is None else read_steps(result.directory)
    if steps is not None and len(steps):
        tables[STEPS] = steps
    for name, table in tables.items():
        path = directory / f"{name}.csv"
        with atomic_path(path) as temporary:
            csv_frame(table).to_csv(temporary, index=False)
        paths.append(path)
    return paths


def csv_frame(table: pd.DataFrame) -> pd.DataFrame:
    """Copy the table with lists and structs as JSON texts."""
    table = table.copy()
    for column in table.columns:
        if table[column].dtype == object:
            table[column] = table[column].map(_csv_value)
    return table


def _csv_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return json.dumps(value, default=np.ndarray.tolist) if isinstance(value, list | dict) else value


def claim_folder(folder: Path, tables: Sequence[str]) -> None:
    """Make a folder for tables of these names. Raises UserError if it holds one or cannot be made."""
    if any((folder / f"{name}.parquet").exists() for name in tables):
        raise UserError("already holds a run's tables", where=str(folder), mend="another --out")
    make_folder(folder)


def write_tables(tables: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> None:
    """Write NAME.parquet and NAME.csv of each table's rows; lists are JSON in CSV."""
    for name, rows in tables.items():
        frame = pd.DataFrame.from_records([dict(row) for row in rows])
        with atomic_path(folder / f"{name}.parquet") as path:
            frame.to_parquet(path, index=False)
        with atomic_path(folder / f"{name}.csv") as path:
            csv_frame(frame).to_csv(path, index=False)
