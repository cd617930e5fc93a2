"""Children that write a run's folder and are killed; after each kill the folder must still be consistent.

Run as `python -m tests.reports.kill_loop FOLDER SEED COUNT CELLS`: this process imports pyarrow once and
forks a writer of CELLS cells per kill. First the writer is killed after each of its steps and half-way
through each table, then at COUNT random moments. Prints one JSON object; a traceback if something is wrong.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from rayk.reports import ResultWriter, load
from rayk.reports.files import locked
from rayk.reports.journal import read_journal
from rayk.types.rows import CellRow, RequestRow, TransferRow
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows

Rows = tuple[CellRow, list[RequestRow], list[TransferRow]]


def make_cell(index: int) -> Rows:
    """A cell whose numbers of rows depend on its index; an aggregated one has no transfers."""
    decode = None if index % 4 == 3 else 2
    cell = cell_row(1, decode, ("BHLNC", "LBHNC"), cell_id=f"c{index}")
    requests = request_rows(cell, random.Random(index), count=2 + index)
    return cell, requests, transfer_rows(cell, random.Random(index), count=1 + index)


def write(folder: Path, num_cells: int) -> None:
    """A whole session: lock, resume, the cells that are left, the tables."""
    # All cells but the first wait for the tables in cells.pending.
    with locked(folder), mock.patch("rayk.reports.writer.PART", 1):
        writer = ResultWriter(folder, spec_yaml=SPEC, environment={"started": "now"}, resume=True)
        for index in range(num_cells):
            cell, requests, transfers = make_cell(index)
            if cell.cell_id not in writer.finished:
                writer.begin_cell(cell.cell_id)
                writer.write_cell(cell, requests, transfers)
        writer.write_tables()


def check(folder: Path, before: list[str]) -> tuple[list[str], str]:
    """The finished cells of a folder, each whole, none lost; and where the kill hit."""
    if not (folder / "cells.parquet").exists():
        assert not before
        return [], "before the first cell" if read_journal(folder) else "before the journal"
    result = load(folder)
    finished = result.cells["cell_id"].tolist()
    assert finished == [f"c{i}" for i in range(len(finished))], finished
    assert finished[: len(before)] == before, "a finished cell was lost"
    for index, name in enumerate(finished):
        _, requests, transfers = make_cell(index)
        found = result.requests[result.requests["cell_id"] == name]
        assert found["request_id"].tolist() == [r.request_id for r in requests]
        assert found["output_token_ids"].map(list).tolist() == [r.output_token_ids for r in requests]
        moved = result.transfers[result.transfers["cell_id"] == name]
        assert Counter(moved["bytes"]) == Counter(t.bytes for t in transfers)
    assert set(result.requests["cell_id"]) <= set(finished), "rows of a cell in flight are not shown"
    json.loads((folder / "environment.json").read_text())
    check_journal(folder)
    return finished, _where(folder)


def check_journal(folder: Path) -> None:
    """A committed cell never begins again; a cell begins once per session at most."""
    committed: set[str] = set()
    for line in read_journal(folder):
        if line["event"] == "begin":
            assert line["cell_id"] not in committed, f"{line['cell_id']} ran twice"
        if line["event"] == "commit":
            assert line["cell_id"] not in committed, f"{line['cell_id']} was committed twice"
            committed.add(line["cell_id"])


def _where(folder: Path) -> str:
    if any(folder.glob(".*.tmp")):
        return "inside a file"
    names = ("requests", "cells")
    rows, cells = (pq.read_table(folder / f"{n}.parquet", columns=["cell_id"])["cell_id"] for n in names)
    return "between two tables" if set(rows.to_pylist()) - set(cells.to_pylist()) else "elsewhere"


class Killer:
    """Kills this process after its n-th step; with `torn`, the n-th table's file is cut in half first."""

    def __init__(self, step: int, *, torn: bool) -> None:
        self._left, self._torn = step, torn
        self._patch(pq, "write_table")
        if torn:
            return
        self._patch(os, "fsync")
        self._patch(os, "write")
        self._patch(Path, "replace")

    def _patch(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def step(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            self._left -= 1
            if self._left == 0:
                if self._torn:
                    os.truncate(arguments[1], arguments[1].stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, step)


def fork(action: Callable[[], None]) -> int:
    """The id of a child that runs `action` and exits 0, or 1 after a traceback."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        action()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def status_of(pid: int) -> int:
    """The child's exit status, -9 for a kill; a child that failed ends this process."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -9), f"the writer ended with {code}"
    return code


def kill_every_step(root: Path, num_cells: int) -> Counter[str]:
    """Kill a fresh writer at each step in turn, then let another one finish its folder."""
    hits: Counter[str] = Counter()
    for torn in (False, True):
        for step in itertools.count(1):
            folder = root / f"{'torn' if torn else 'step'}{step}"

            def session(step: int = step, torn: bool = torn, folder: Path = folder) -> None:
                Killer(step, torn=torn)
                write(folder, num_cells)

            if status_of(fork(session)) == 0:
                break
            finished, where = check(folder, [])
            hits[where] += 1
            finish(folder, finished, num_cells)
    return hits


def finish(folder: Path, before: list[str], num_cells: int) -> None:
    """A session that nobody kills completes the folder and leaves no temporary file."""
    assert status_of(fork(lambda: write(folder, num_cells))) == 0
    finished, _ = check(folder, before)
    assert len(finished) == num_cells
    assert not list(folder.glob(".*")), "leftovers of killed writers are removed"


def kill_at_random(root: Path, seed: int, count: int, num_cells: int) -> Counter[str]:
    """Kill writers at random moments; each folder is resumed until it is whole."""
    draw = random.Random(seed)
    began = time.monotonic()
    assert status_of(fork(lambda: write(root / "measured", num_cells))) == 0
    whole_s = time.monotonic() - began
    hits: Counter[str] = Counter()
    number, finished = 0, list[str]()
    while hits.total() < count:
        folder = root / f"random{number}"
        pid = fork(lambda folder=folder: write(folder, num_cells))  # type: ignore[misc]
        time.sleep(draw.uniform(0, whole_s))
        os.kill(pid, signal.SIGKILL)
        killed = status_of(pid) == -9
        finished, where = check(folder, finished) if folder.exists() else ([], "before the folder")
        if killed:
            hits[where] += 1
        if len(finished) == num_cells:
            finish(folder, finished, num_cells)
            number, finished = number + 1, []
    return hits


def main() -> None:
    root = Path(sys.argv[1])
    seed, count, num_cells = map(int, sys.argv[2:])
    steps = kill_every_step(root, num_cells)
    moments = kill_at_random(root, seed, count, num_cells)
    print(json.dumps({"steps": steps, "moments": moments, "seed": seed}))


if __name__ == "__main__":
    main()
