"""Write a run's folder: a cell's rows are on disk before the next cell begins, at a cost that does not grow
with the number of cells."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayk.reports.columns import (
    FIELDS,
    cell_record,
    make_table,
    request_record,
    step_record,
    transfer_record,
    typed,
)
from rayk.reports.files import STEPS, TABLES, atomic_path, make_folder, remove_leftovers, write_text
from rayk.reports.folder import FACTS, PROBED, changed_facts, check_directory, read_environment
from rayk.reports.journal import Journal
from rayk.reports.pending import FILE as PENDING
from rayk.reports.pending import PART, FinishedCell, Pending, added, joined, read_pending
from rayk.reports.schema import check_schema, stamped
from rayk.types.errors import UserError
from rayk.types.rows import CellRow, RequestRow, TransferRow
from rayk.types.steps import StepRow


class ResultWriter:
    """Writes cells.parquet, requests.parquet, transfers.parquet, steps.parquet where engines record their
    steps, environment.json and spec.yaml. A cell is finished when it stands in cells.parquet or in
    `pending.FILE`. Tables are replaced atomically, cells.parquet last: rows that no cell names, as a killed
    writer leaves, are passed over. Raises UserError for a folder that holds another run's tables
    (`folder.check_directory`)."""

    def __init__(
        self,
        directory: str | Path,
        *,
        spec_yaml: str,
        environment: Mapping[str, Any],
        resume: bool = False,
        renew: Callable[[str], str] = str,
        order: Sequence[str] = (),
    ) -> None:
        """Take the ids of all cells in `order`, that of the finished tables, where they run in another."""
        self.directory = Path(directory)
        inputs = environment.get("inputs")
        check_directory(self.directory, spec_yaml, resume=resume, inputs=inputs, renew=renew)
        make_folder(self.directory)
        remove_leftovers(self.directory)
        self.finished: dict[str, str] = {}  # cell id -> verdict of the cells on disk
        self._tables = {name: make_table([], fields) for name, fields in FIELDS.items()}
        self._new: list[FinishedCell] = []  # cells that `_tables` does not have
        self._order = {cell_id: place for place, cell_id in enumerate(order)}
        self._pending = Pending(self.directory)
        self._sessions: list[dict[str, Any]] = []
        self.changed_facts: list[str] = []  # against the session before
        if resume:
            self._read_finished()
            self._remember_sessions(environment)
        write_text(self.directory / "spec.yaml", spec_yaml)
        self.write_environment(environment)
        self._journal = Journal(self.directory)
        self._journal.note("open", finished=len(self.finished))

    def begin_cell(self, cell_id: str) -> None:
        self._journal.note("begin", cell_id=cell_id)

    def write_cell(
        self,
        row: CellRow,
        requests: Sequence[RequestRow],
        transfers: Sequence[TransferRow],
        steps: Sequence[StepRow] = (),
    ) -> None:
        """Add a cell: it is on disk when this returns."""
        assert row.cell_id not in self.finished, f"cell {row.cell_id} is written already"
        order = {r.request_id: i for i, r in enumerate(requests)}
        transfers = sorted(transfers, key=lambda t: _place(t, order))
        cell = FinishedCell(
            cells=[cell_record(row, requests, transfers)],
            requests=[request_record(r) for r in requests],
            transfers=[transfer_record(t) for t in transfers],
            steps=[step_record(s) for s in steps],
        )
        self._new.append(cell)
        self.finished[row.cell_id] = row.verdict
        if len(self._new) >= max(1, len(self.finished) // PART):
            self.write_tables()
        else:
            self._pending.append(cell)
        self._journal.note("commit", cell_id=row.cell_id, verdict=row.verdict)

    def write_tables(self, *, is_last: bool = False) -> None:
        """Write all tables, also empty ones, cells last; in the end in the order of the cells."""
        for name, table in self._tables.items():
            rows = [row for cell in self._new for row in getattr(cell, name)]
            self._tables[name] = added(name, table, rows)
            if is_last and self._order:
                self._tables[name] = _sorted(self._tables[name], self._order)
        self._new.clear()
        # Most runs record no steps.
        for name in (*((STEPS,) if len(self._tables[STEPS]) else ()), *reversed(TABLES)):
            self._write(name)
        self._pending.clear()

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace environment.json, e.g. when the cluster is known; earlier sessions stay in it."""
        facts = dict(environment) | ({"sessions": self._sessions} if self._sessions else {})
        text = json.dumps(facts, indent=2, sort_keys=False, default=str)
        write_text(self.directory / "environment.json", text + "\n")

    def finish(self) -> Path:
        """Write the tables and report.html; returns the report's path."""
        from rayk.reports.report import write_html

        self.write_tables(is_last=True)
        path = write_html(self.directory)
        self._journal.note("close", finished=len(self.finished))
        return path

    def close(self) -> None:
        self._journal.close()

    def _write(self, name: str) -> None:
        with atomic_path(self.directory / f"{name}.parquet") as path:
            pq.write_table(stamped(self._tables[name]), path)

    def _read_finished(self) -> None:
        """Take over the whole cells and their rows."""
        pending = read_pending(self.directory)
        self._tables = {name: _read(self.directory, name, fields) for name, fields in FIELDS.items()}
        counts = _RowCounts(self._tables)
        cells = self._tables["cells"]
        is_whole = [counts.has_all_of(cell) for cell in cells.to_pylist()]
        if not all(is_whole):
            self._tables["cells"] = cells.filter(pa.array(is_whole))
            # Said at once: rows written again must not pass for those of the old cell.
            self._write("cells")
        self._tables = joined(self._tables, pending)
        named = self._tables["cells"].select(["cell_id", "verdict"]).to_pylist()
        self.finished = {row["cell_id"]: row["verdict"] for row in named}
        if (self.directory / PENDING).exists():
            self.write_tables()

    def _remember_sessions(self, environment: Mapping[str, Any]) -> None:
        """Keep when the session before ran, what it finished, and what it ran on if that differs."""
        before = read_environment(self.directory)
        if not before:
            return
        self.changed_facts = changed_facts(before, environment)
        last: dict[str, Any] = {k: before[k] for k in ("started", "command", *PROBED) if k in before}
        last["finished_cells"] = len(self.finished)
        if self.changed_facts:
            last |= {k: before[k] for k in FACTS if k in before}
        self._sessions = [*before.get("sessions", []), last]


class _RowCounts:
    """Counts rows and handed-over descriptors per cell, to see whether the tables hold all that it should
    have."""

    def __init__(self, rows: Mapping[str, pa.Table]) -> None:
        self._requests: Counter[str] = Counter(rows["requests"]["cell_id"].to_pylist())
        self._descriptors: Counter[str] = Counter()
        moved = rows["transfers"]
        names = [n for n in ("cell_id", "num_descriptors", "purpose") if n in moved.column_names]
        for row in moved.select(names).to_pylist():
            if row.get("purpose") in (None, "handover"):
                self._descriptors[row["cell_id"]] += row["num_descriptors"]

    def has_all_of(self, cell: Mapping[str, Any]) -> bool:
        name = cell["cell_id"]
        same = self._requests[name] == cell["num_requests"]
        return same and self._descriptors[name] == (cell["num_descriptors"] or 0)


def _sorted(table: pa.Table, order: Mapping[str, int]) -> pa.Table:
    """Put rows in the order of their cells; those of one cell keep theirs."""
    places = [order.get(cell_id, -1) for cell_id in table["cell_id"].to_pylist()]
    return table.take(pa.array(sorted(range(len(places)), key=places.__getitem__), pa.int64()))


def _place(row: TransferRow, order: Mapping[str, int]) -> tuple[int, ...]:
    """Order transfers in their table: they end in any order."""
    request = order.get(row.request_id, len(order))
    return (row.repeat, request, row.group, row.consumer_rank, row.producer_rank)


def _read(directory: Path, name: str, fields: dict[str, Any]) -> pa.Table:
    """Read a table of an earlier session; empty if it did not get that far. Raises UserError."""
    path = directory / f"{name}.parquet"
    if not path.is_file():
        return make_table([], fields)
    try:
        check_schema(path)
        return typed(pq.read_table(path), fields)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise UserError(
            problem=f"cannot resume: cannot read the table: {error}", where=str(path), mend="another --out"
        ) from error
