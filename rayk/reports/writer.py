"""A run's folder while it is being filled: a cell's rows are on disk before the next cell begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from rayk.reports.columns import (
    CELL_FIELDS,
    REQUEST_FIELDS,
    TRANSFER_FIELDS,
    cell_record,
    make_table,
    request_record,
    transfer_record,
)
from rayk.reports.files import TABLES, atomic_path, write_text
from rayk.types.errors import UserError
from rayk.types.rows import CellRow, RequestRow, TransferRow


class ResultWriter:
    """Writes cells.parquet, requests.parquet, transfers.parquet, environment.json and spec.yaml.

    Every file is replaced atomically, cells.parquet last: a cell it names has all its rows on disk.
    Raises UserError for a folder that holds another run's tables.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        spec_yaml: str,
        environment: Mapping[str, Any],
        resume: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._records: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        check_directory(self.directory, spec_yaml, resume=resume)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(problem=f"cannot create {self.directory}: {error.strerror}") from error
        if resume:
            self._read_finished()
        write_text(self.directory / "spec.yaml", spec_yaml)
        self.write_environment(environment)

    @property
    def finished(self) -> dict[str, str]:
        """Cell id -> verdict of the cells on disk."""
        return {r["cell_id"]: r["verdict"] for r in self._records["cells"]}

    def write_cell(
        self,
        row: CellRow,
        requests: Sequence[RequestRow],
        transfers: Sequence[TransferRow],
    ) -> None:
        """Add a cell and put all three tables on disk."""
        assert row.cell_id not in self.finished, f"cell {row.cell_id} is written already"
        self._records["requests"] += [request_record(r) for r in requests]
        self._records["transfers"] += [transfer_record(t) for t in transfers]
        self._records["cells"].append(cell_record(row, requests, transfers))
        self.write_tables()

    def write_tables(self) -> None:
        """Put the tables on disk as they are (empty ones too)."""
        fields = {
            "transfers": TRANSFER_FIELDS,
            "requests": REQUEST_FIELDS,
            "cells": CELL_FIELDS,
        }
        for name, columns in fields.items():
            table = make_table(self._records[name], columns)
            with atomic_path(self.directory / f"{name}.parquet") as path:
                pq.write_table(table, path)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace environment.json, e.g. when the cluster is known."""
        text = json.dumps(environment, indent=2, sort_keys=False, default=str)
        write_text(self.directory / "environment.json", text + "\n")

    def finish(self) -> Path:
        """Write the tables and report.html; returns the report's path."""
        from rayk.reports.html import write_html

        self.write_tables()
        return write_html(self.directory)

    def _read_finished(self) -> None:
        for name in TABLES:
            path = self.directory / f"{name}.parquet"
            if path.is_file():
                self._records[name] = pq.read_table(path).to_pylist()
        # Rows of a cell that was in flight when the run was cut off are measured again.
        finished = self.finished
        for name in ("requests", "transfers"):
            self._records[name] = [r for r in self._records[name] if r["cell_id"] in finished]


def check_directory(directory: str | Path, spec_yaml: str, *, resume: bool) -> None:
    """Refuse a folder that holds tables, unless resuming the same spec. Raises UserError."""
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise UserError(problem="is a file, not a folder", where=str(folder))
    if not any((folder / f"{name}.parquet").exists() for name in TABLES):
        return
    if not resume:
        raise UserError(
            problem="already holds a run's tables",
            where=str(folder),
            mend="--resume to continue it, or another --out",
        )
    path = folder / "spec.yaml"
    before = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None) or {}
    now = yaml.safe_load(spec_yaml)
    changed = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    if changed:
        raise UserError(
            problem=f"cannot resume: the spec differs from the run's in {', '.join(changed)}",
            where=str(path),
            mend="the same spec and --set options, or another --out",
        )
