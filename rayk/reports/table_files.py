"""Write tables as files of their own: a run's as CSV, and those of jobs that are no experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.files import TABLES, atomic_path, make_folder
from rayk.reports.result import Result
from rayk.types.errors import UserError


def write_csv(result: Result, directory: Path) -> list[Path]:
    """Write cells.csv, requests.csv and transfers.csv; lists and structs are JSON texts."""
    paths = []
    for name in TABLES:
        path = directory / f"{name}.csv"
        with atomic_path(path) as temporary:
            csv_frame(getattr(result, name)).to_csv(temporary, index=False)
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
    return json.dumps(value) if isinstance(value, list | dict) else value


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
