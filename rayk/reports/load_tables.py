"""Tables of load tests: a cell per load, a row per request; columns as a run's where they mean the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import yaml

from rayk.reports.columns import TRANSFER_FIELDS, make_table
from rayk.reports.fields import kinds
from rayk.reports.files import atomic_path, make_folder, write_text
from rayk.reports.folder import check_directory
from rayk.reports.load_fields import LOAD_CELLS, LOAD_REQUESTS
from rayk.reports.load_fields import METRICS as METRIC_MEANINGS
from rayk.reports.load_fields import STATISTICS as STATISTIC_WORDS
from rayk.reports.schema import stamped

VERDICTS = ("VALID", "NOISY", "INVALID")
"""Of a load's numbers: to be trusted, imprecise, not what they say."""
METRICS = tuple(METRIC_MEANINGS)
STATISTICS = tuple(STATISTIC_WORDS)

LOAD_CELL_FIELDS = kinds(LOAD_CELLS)
LOAD_REQUEST_FIELDS = kinds(LOAD_REQUESTS)
LOAD_FIELDS = {"cells": LOAD_CELL_FIELDS, "requests": LOAD_REQUEST_FIELDS}
"""Columns of a bench's tables, with their types."""


def is_load(cells: pd.DataFrame) -> bool:
    """Whether cells are loads that were sent to a server."""
    return len(cells) > 0 and bool(cells["verdict"].isin(VERDICTS).all())


def load_headline(cells: pd.DataFrame) -> str:
    """E.g. `2 loads: 1 VALID, 1 NOISY`."""
    counts = cells["verdict"].value_counts().to_dict()
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    return f"{len(cells)} load{'s'[: len(cells) != 1]}: {told}"


class LoadWriter:
    """Writes a bench's folder: after each load its tables, whole, and the report."""

    def __init__(
        self, directory: Path, *, spec: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]
    ) -> None:
        text = yaml.safe_dump({"name": "bench", "loads": [dict(load) for load in spec]}, sort_keys=False)
        check_directory(directory, text, resume=False)
        make_folder(directory)
        self.directory = directory
        self._cells: list[Mapping[str, Any]] = []
        self._requests: list[Mapping[str, Any]] = []
        write_text(directory / "spec.yaml", text)
        write_text(directory / "environment.json", json.dumps(environment, indent=2, default=str) + "\n")

    def write(self, cell: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> None:
        """Add a load, and put tables and report on disk; cells last, as a run does."""
        from rayk.reports.html import write_html

        self._cells.append(cell)
        self._requests += requests
        self._table("transfers", [], TRANSFER_FIELDS)
        self._table("requests", self._requests, LOAD_REQUEST_FIELDS)
        self._table("cells", self._cells, LOAD_CELL_FIELDS)
        write_html(self.directory)

    def _table(self, name: str, rows: Sequence[Mapping[str, Any]], fields: dict[str, Any]) -> None:
        with atomic_path(self.directory / f"{name}.parquet") as path:
            pq.write_table(stamped(make_table([dict(row) for row in rows], fields)), path)
