"""Runs of the command that are interrupted at drawn moments and resumed, and what must be true of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayk import load
from rayk.reports.differences import differences_of
from rayk.reports.journal import read_journal
from tests.experiments.conftest import wait_until

START_S = 180.0
"""How long a session may take to its next cell."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """A signal `delay_s` after the session's `begins`-th cell began (0: after the process started)."""

    signum: int
    begins: int
    delay_s: float


def draw_interrupts(seed: int, num_cells: int, signals: list[int]) -> list[Interrupt]:
    """Moments all over a run's cells; one of them before its session's first cell: while it plans, starts the
    cluster or asks the reference."""
    draw = random.Random(seed)
    early = draw.randrange(len(signals))
    cells = sorted(draw.sample(range(1, num_cells), len(signals)))
    begins = [cell - before for cell, before in zip(cells, [0, *cells], strict=False)]
    begins[early] = 0
    return [
        Interrupt(signum, count, draw.uniform(0, 0.3) if count else draw.uniform(0, 8))
        for signum, count in zip(signals, begins, strict=True)
    ]


@dataclass
class Interrupted:
    """One run over all its sessions, in the folder `out`."""

    spec: Path
    out: Path
    environment: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self.left_behind: list[dict[int, str]] = []
        """Per killed session: its processes, id -> start time."""

    def command(self, *, resume: bool) -> list[str]:
        """`rayk run` of this spec into this folder."""
        command = [sys.executable, "-m", "rayk.cli.main", "run", str(self.spec), "--out", str(self.out)]
        return [*command, *(["--resume"] if resume else [])]

    def start(self, *, resume: bool) -> subprocess.Popen[str]:
        """A session."""
        return subprocess.Popen(
            self.command(resume=resume),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(self.environment or {})},
        )

    def interrupt(self, moment: Interrupt, *, resume: bool) -> str:
        """A session that is sent a signal at a moment; what it printed. It exits as documented."""
        done, opened = self._count("begin"), self._count("open")
        session = self.start(resume=resume)
        if moment.begins:
            wait_until(
                lambda: self._count("begin") >= done + moment.begins or session.poll() is not None,
                f"cell {moment.begins} of a session",
                START_S,
            )
        elif moment.signum != signal.SIGKILL:
            # Before that, Python itself may still be starting.
            wait_until(lambda: self._count("open") > opened or session.poll() is not None, "a start", START_S)
        time.sleep(moment.delay_s)
        family = descendants(session.pid)
        session.send_signal(moment.signum)
        output, _ = session.communicate(timeout=90)
        expected = -9 if moment.signum == signal.SIGKILL else 128 + moment.signum
        assert session.returncode in (expected, 0), output
        if session.returncode:
            self.left_behind.append(family)
        return output

    def finish(self) -> str:
        """The last session, which nobody interrupts; what it printed."""
        session = self.start(resume=True)
        output, _ = session.communicate(timeout=900)
        assert session.returncode == 0, output
        return output

    def _count(self, event: str) -> int:
        return sum(line["event"] == event for line in read_journal(self.out))

    def _events(self, event: str) -> list[str]:
        return [line["cell_id"] for line in read_journal(self.out) if line["event"] == event]

    def check(self, num_cells: int) -> dict[str, Any]:
        """Every cell is there once, none ran after it was finished; returns the counts."""
        cells = load(self.out).cells["cell_id"].tolist()
        assert len(cells) == len(set(cells)) == num_cells
        begins, commits = Counter(self._events("begin")), self._events("commit")
        assert set(begins) == set(cells), "every cell began"
        # A kill between the last table and the journal's line leaves a finished cell without one.
        assert len(commits) == len(set(commits))
        assert len(cells) - len(commits) <= len(self.left_behind)
        again = {cell: count - 1 for cell, count in begins.items() if count > 1}
        assert sum(again.values()) <= len(self.left_behind), "only a cell in flight begins again"
        check_order(read_journal(self.out))
        return {"cells": len(cells), "begins": begins.total(), "commits": len(commits), "again": again}


def check_order(journal: list[dict[str, Any]]) -> None:
    """No cell begins after it was finished: by its line, or by the count that the next session found."""
    committed: list[str] = []
    in_flight: str | None = None
    for line in journal:
        if line["event"] == "open":
            if line["finished"] == len(committed) + 1:  # killed before it could say so
                assert in_flight is not None
                committed.append(in_flight)
            assert line["finished"] == len(committed), "the tables hold what was finished"
            in_flight = None
        elif line["event"] == "begin":
            assert line["cell_id"] not in committed, f"{line['cell_id']} ran twice"
            in_flight = line["cell_id"]
        elif line["event"] == "commit":
            committed.append(line["cell_id"])
            in_flight = None


def assert_same_tables(one: Path, other: Path) -> None:
    """Two runs' tables hold the same cells in the same order, and the same values, times and nodes aside."""
    left, right = load(one), load(other)
    assert left.cells["cell_id"].tolist() == right.cells["cell_id"].tolist()
    unlike = "\n".join(str(difference) for difference in differences_of(left, right))
    assert not unlike, unlike
    for name in ("cells", "requests", "transfers"):
        assert len(getattr(left, name)) == len(getattr(right, name)) > 0
        assert set(getattr(left, name).columns) == set(getattr(right, name).columns)


# --- processes ------------------------------------------------------------------------------------


def processes() -> dict[int, tuple[int, str, str]]:
    """Process id -> (parent, state, start time) of this machine's processes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        found[int(path.parent.name)] = (int(fields[1]), fields[0], fields[19])
    return found


def descendants(pid: int) -> dict[int, str]:
    """Id -> start time of the processes that descend from one."""
    table, found, todo = processes(), {}, [pid]
    while todo:
        parent = todo.pop()
        children = {p: start for p, (of, _, start) in table.items() if of == parent}
        found |= children
        todo += children
    return found


def alive(family: Mapping[int, str]) -> list[int]:
    """Those of a family that still run: a zombie does not, nor another process with an old id."""
    table = processes()
    return [
        p
        for p, start in family.items()
        if p in table and table[p][1:] not in {("Z", start), ("X", start)} and table[p][2] == start
    ]
