"""A run read back from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rayk.reports.files import TABLES
from rayk.types.errors import UserError


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
    """Read a run's tables. Raises UserError when the folder has none."""
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(problem="no such run folder", where=str(folder))
    missing = [f"{name}.parquet" for name in TABLES if not (folder / f"{name}.parquet").is_file()]
    if missing:
        raise UserError(
            problem=f"not a run's folder: no {', '.join(missing)}",
            where=str(folder),
            mend="a folder that `rayk run --out` wrote",
        )
    cells, requests, transfers = (_read(folder / f"{name}.parquet") for name in TABLES)
    environment, spec = folder / "environment.json", folder / "spec.yaml"
    return Result(
        cells=cells,
        requests=requests,
        transfers=transfers,
        environment=json.loads(environment.read_text()) if environment.is_file() else {},
        spec_yaml=spec.read_text(encoding="utf-8") if spec.is_file() else "",
        directory=folder,
    )


def _read(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(problem=f"cannot read the table: {error}", where=str(path)) from error
