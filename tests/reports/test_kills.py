"""SIGKILL at every step of the writer and at random moments: no half-written table, no lost cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.markers import thorough


def kill(folder: Path, *, seed: int, count: int, cells: int) -> dict[str, Any]:
    """What the kill loop counted; its assertions end it with a traceback."""
    arguments = [str(folder), str(seed), str(count), str(cells)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.reports.kill_loop", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    print(counted)
    # Kills that hit nothing would prove nothing: the hard moments are among them.
    assert counted["steps"]["inside a file"] > 0
    assert counted["steps"]["between two tables"] > 0
    assert sum(counted["moments"].values()) == count
    return counted


@thorough
def test_a_writer_killed_at_each_of_its_steps(tmp_path: Path) -> None:
    counted = kill(tmp_path, seed=20261121, count=12, cells=2)
    # Three tables twice, each with four steps, and three torn ones; the line of a cell that waits; and what
    # opening a folder takes.
    assert sum(counted["steps"].values()) > 2 * (12 + 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_writer_killed_hundreds_of_times(tmp_path: Path) -> None:
    counted = kill(tmp_path, seed=1, count=400, cells=5)
    assert counted["moments"]["inside a file"] > 40
    assert counted["moments"]["between two tables"] > 0
