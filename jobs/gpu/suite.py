"""The GPU tests, eight at a time where pytest-xdist is there: a row per test, and one when all have run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jobs.gpu.pytest_rows import SETTINGS
from jobs.gpu.pytest_rows import STAGE as NAME
from jobs.gpu.rows import Row
from jobs.gpu.stages import ROOT, Bench, Stage

ITEM = "all of them"
STAND_IN = ("tests/kernels/test_on_devices.py", "-m", "not gpu", "-k", "copied and 16")
"""What a machine without a GPU runs in their place."""
OUTCOMES = ("passed", "failed", "skipped")
_ENDS = (0, 1, 5)
"""pytest's own statuses: all passed, some failed, none was left to run."""


def gpu_files(root: Path) -> list[str]:
    """Test files that import the marker `gpu`, as `make test-gpu` finds them."""
    command = ["grep", "-rlE", r"tests.markers import .*\bgpu\b", "tests", "--include=test_*.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return sorted(done.stdout.split())


def _measure(item: str, bench: Bench) -> Iterator[Row]:
    rows = bench.rows
    settings = {"folder": str(rows.folder), "commit": rows.commit, "done": sorted(rows.items(NAME))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "jobs.gpu.pytest_rows"]
    if bench.is_small:
        command += STAND_IN
    else:
        command += ["--numprocesses=8"] if importlib.util.find_spec("xdist") is not None else []
        command += ["-m", "gpu", *gpu_files(ROOT)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {SETTINGS: json.dumps(settings)}, check=False)
    if ended.returncode not in _ENDS:
        raise RuntimeError(f"pytest ended with status {ended.returncode}")
    found = [row["status"] for row in rows.read() if row["stage"] == NAME]
    note = ", ".join(f"{found.count(outcome)} {outcome}" for outcome in OUTCOMES)
    yield Row(kernel=item, status="failed" if "failed" in found else "passed", note=note)


STAGE = Stage(name=NAME, about="the GPU tests", items=lambda device: [ITEM], measure=_measure)
