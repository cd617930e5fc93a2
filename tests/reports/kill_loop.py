"""Children that write a run's folder and are killed; after each kill the folder must still be consistent.

Run as `python -m tests.reports.kill_loop FOLDER SEED COUNT`: this process imports pyarrow once and forks a
writer per kill. First every step of the writer is hit (before it, half-way through a file, after it), then
COUNT random moments. Prints one JSON object; exits 1 with a traceback at the first inconsistency.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rayk.reports import ResultWriter, load
from rayk.reports.files import locked
from rayk.reports.journal import read_journal
from rayk.types.rows import CellRow, RequestRow, TransferRow
from tests.reports.synthetic import SPEC, cell_row, request_rows, transfer_rows

CELLS = 4
Rows = tuple[CellRow, list[RequestRow], list[TransferRow]]


def make_cell(index: int) -> Rows:
    """A cell whose numbers of rows depend on its index; an aggregated one has no transfers."""
    decode = None if index % 4 == 3 else 2
    cell = cell_row(1, decode, ("BHLNC", "LBHNC"), cell_id=f"c{index}")
    requests = request_rows(cell, random.Random(index), count=2 + index)
    return cell, requests, transfer_rows(cell, random.Random(index), count=1 + index)


def write(folder: Path) -> None:
    """A whole session: lock, resume, the cells that are left, the report."""
    with locked(folder):
        writer = ResultWriter(folder, spec_yaml=SPEC, environment={"started": "now"}, resume=True)
        for index in range(CELLS):
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
    return finished, _where(folder, finished)


def check_journal(folder: Path) -> None:
    """A committed cell never begins again; a cell begins once per session at most."""
    committed: set[str] = set()
    for line in read_journal(folder):
        if line["event"] == "begin":
            assert line["cell_id"] not in committed, f"{line['cell_id']} ran twice"
        if line["event"] == "commit":
            assert line["cell_id"] not in committed, f"{line['cell_id']} was committed twice"
            committed.add(line["cell_id"])


def _where(folder: Path, finished: list[str]) -> str:
    if any(folder.glob(".*.tmp")):
        return "inside a file"
    rows = pq.read_table(folder / "requests.parquet", columns=["cell_id"])["cell_id"].to_pylist()
    return "between two tables" if set(rows) - set(finished) else "elsewhere"


class Killer:
    """Makes the n-th step of this process its last: `before` it, `half` through it, or `after` it."""

    def __init__(self, step: int, moment: str) -> None:
        self._left, self._moment = step, moment
        self._patch(os, "fsync")
        self._patch(os, "write")
        self._patch(Path, "replace")
        self._patch(pq, "write_table")

    def _patch(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def step(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and self._moment == "before":
                self._die()
            result = real(*arguments, **options)
            if self._left == 0:
                if self._moment == "half" and name == "write_table":
                    os.truncate(arguments[1], arguments[1].stat().st_size // 2)
                self._die()
            return result

        setattr(owner, name, step)

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


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
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def status_of(pid: int) -> int:
    """The child's exit status, -9 for a kill; a child that failed ends this process."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -9), f"the writer ended with {code}"
    return code


def kill_every_step(root: Path) -> Counter[str]:
    """Kill a fresh writer at each step in turn, then let another one finish its folder."""
    hits: Counter[str] = Counter()
    for moment in ("before", "half", "after"):
        step = 0
        while True:
            step += 1
            folder = root / f"{moment}{step}"

            def session(step: int = step, moment: str = moment, folder: Path = folder) -> None:
                Killer(step, moment)
                write(folder)

            if status_of(fork(session)) == 0:
                break
            finished, where = check(folder, [])
            hits[where] += 1
            finish(folder, finished)
        assert step > 10 * CELLS, f"the writer takes {step} steps: too few of them are seen"
    return hits


def finish(folder: Path, before: list[str]) -> None:
    """A session that nobody kills completes the folder and leaves no temporary file."""
    assert status_of(fork(lambda: write(folder))) == 0
    finished, _ = check(folder, before)
    assert len(finished) == CELLS
    assert not list(folder.glob(".*.tmp")), "leftovers of killed writers are removed"
    assert not (folder / ".lock").exists()


def kill_at_random(root: Path, seed: int, count: int) -> Counter[str]:
    """Kill writers at random moments; each folder is resumed until it is whole."""
    draw = random.Random(seed)
    began = time.monotonic()
    assert status_of(fork(lambda: write(root / "measured"))) == 0
    whole_s = time.monotonic() - began
    hits: Counter[str] = Counter()
    number, finished = 0, list[str]()
    while sum(hits.values()) < count:
        folder = root / f"random{number}"
        pid = fork(lambda folder=folder: write(folder))  # type: ignore[misc]
        time.sleep(draw.uniform(0, whole_s))
        os.kill(pid, signal.SIGKILL)
        killed = status_of(pid) == -9
        finished, where = check(folder, finished) if folder.exists() else ([], "before the folder")
        if killed:
            hits[where] += 1
        if len(finished) == CELLS:
            finish(folder, finished)
            number, finished = number + 1, []
    return hits


def main() -> None:
    root, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    steps = kill_every_step(root)
    moments = kill_at_random(root, seed, count)
    print(json.dumps({"steps": steps, "moments": moments, "seed": seed}))


if __name__ == "__main__":
    main()
