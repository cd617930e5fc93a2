"""Write a bench's folder while its loads run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from rayk.reports.columns import TRANSFER_FIELDS, make_table
from rayk.reports.files import atomic_path, make_folder, write_text
from rayk.reports.folder import check_directory
from rayk.reports.load_fields import LOAD_CELL_FIELDS, LOAD_REQUEST_FIELDS
from rayk.reports.schema import stamped


class LoadWriter:
    """Writes, after each load, all tables and the report."""

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
        """Add a load and write tables and report; cells go last, as in a run."""
        from rayk.reports.report import write_html

        self._cells.append(cell)
        self._requests += requests
        self._table("transfers", [], TRANSFER_FIELDS)
        self._table("requests", self._requests, LOAD_REQUEST_FIELDS)
        self._table("cells", self._cells, LOAD_CELL_FIELDS)
        write_html(self.directory)

    def _table(self, name: str, rows: Sequence[Mapping[str, Any]], fields: dict[str, Any]) -> None:
        with atomic_path(self.directory / f"{name}.parquet") as path:
            pq.write_table(stamped(make_table([dict(row) for row in rows], fields)), path)
