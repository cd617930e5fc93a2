"""Keep cells.pending: finished cells that the tables do not have yet, a line each, with its checksum. A table
is written whole, so writing it for every cell would cost n² rows for n cells. Cells are appended here, and
the tables are written when PART of them are new. Readers read this file first: cells that reached the tables
meanwhile are in both."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayk.reports.columns import FIELDS, make_table
from rayk.reports.files import STEPS, TABLES, sync
from rayk.types.errors import UserError
from rayk.types.files import parse_json, read_bytes

FILE = "cells.pending"
MAX_BYTES = 1 << 30
MEND = "remove the file: `--resume` then runs its cells again"
PART = 8  # an eighth: with so many new cells the tables are written, so n cells cost less than 9 n rows


@dataclass(frozen=True, kw_only=True)
class FinishedCell:
    cells: list[dict[str, Any]]  # its one row
    requests: list[dict[str, Any]]
    transfers: list[dict[str, Any]]
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cell_id(self) -> str:
        return str(self.cells[0]["cell_id"])


class Pending:
    """Appends cells; each is on the device when `append` returns."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def append(self, cell: FinishedCell) -> None:
        """Add a cell. Raises OSError and leaves the file as it was."""
        body = json.dumps(vars(cell), separators=(",", ":"), default=_plain).encode()
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        is_new = not self._path.exists()
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(handle).st_size
            try:
                while line:
                    line = line[os.write(handle, line) :]
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
        if is_new:
            sync(self._path.parent)

    def clear(self) -> None:
        """Drop all cells. Call when the tables hold them."""
        self._path.unlink(missing_ok=True)


def read_pending(folder: Path) -> list[FinishedCell]:
    """Read the whole cells; a torn last line, as a killed writer leaves, is passed over. Raises UserError for
    damage."""
    path = folder / FILE
    try:
        lines = read_bytes(path, MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(problem=f"cannot be read: {error.strerror}", where=str(path)) from error
    lines = [line for line in lines if line]
    found = []
    for number, line in enumerate(lines, 1):
        body = line[9:]
        if line[:9] == b"%08x " % zlib.crc32(body):
            try:
                found.append(_cell(body))
            except ValueError as error:
                raise UserError(
                    problem=f"line {number} is no cell: {error}", where=str(path), mend=MEND
                ) from error
        elif number < len(lines):
            raise UserError(
                problem=f"line {number} is damaged: its checksum is another", where=str(path), mend=MEND
            )
    return found


def _cell(body: bytes) -> FinishedCell:
    """Parse a line. Raises ValueError."""
    found = parse_json(body)
    if not isinstance(found, dict) or found.keys() - {STEPS} != set(TABLES):
        raise ValueError(f"not {', '.join(TABLES)}")
    if not all(isinstance(rows, list) and all(isinstance(r, dict) for r in rows) for rows in found.values()):
        raise ValueError("not lists of rows")
    if len(found["cells"]) != 1 or "cell_id" not in found["cells"][0]:
        raise ValueError("not one row with a cell_id")
    return FinishedCell(**found)


def joined(tables: Mapping[str, pa.Table], cells: Sequence[FinishedCell]) -> dict[str, pa.Table]:
    """Add the cells that the tables lack, and drop rows of cells that are in neither."""
    known = set(tables["cells"]["cell_id"].to_pylist())
    new = [cell for cell in cells if cell.cell_id not in known]
    ids = pa.array(sorted(known), pa.string())
    found = {}
    for name, table in tables.items():
        kept = table.filter(pc.is_in(table["cell_id"], value_set=ids))
        found[name] = added(name, kept, [row for cell in new for row in getattr(cell, name)])
    return found


def added(name: str, table: pa.Table, rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Append rows; columns that only some rows have are null elsewhere."""
    if not rows:
        return table
    if name == "cells":
        # Axes have the types that all their values allow.
        return make_table([*table.to_pylist(), *rows], FIELDS[name])
    both = [table, make_table(rows, FIELDS[name])]
    return pa.concat_tables(both, promote_options="default").combine_chunks()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} in a row")
