"""A plugin of pytest: a row for each test that has run; tests that have one are left out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jobs.gpu.rows import Row, Rows

STAGE = "tests"
SETTINGS = "RAYK_GPU_DAY_TESTS"
"""Environment variable: JSON of folder, commit, and the tests to leave out, alike for all workers."""
NOTE_CHARACTERS = 200


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has a row."""
    done = set(json.loads(os.environ[SETTINGS])["done"])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's row, in the one process that hears of all tests."""
    is_result = report.when == "call" or (report.when == "setup" and not report.passed)
    if "PYTEST_XDIST_WORKER" in os.environ or not is_result:
        return
    settings = json.loads(os.environ[SETTINGS])
    told = (
        [line for line in report.longreprtext.splitlines() if line.startswith("E ")] if report.failed else []
    )
    note = "".join(told[:1])
    if report.skipped and isinstance(report.longrepr, tuple):
        note = report.longrepr[2]
    name = report.nodeid.split("@")[0]  # pytest-xdist adds the group
    row = Row(kernel=name, status=report.outcome, ms=report.duration * 1e3, note=note[:NOTE_CHARACTERS])
    Rows(Path(settings["folder"]), commit=settings["commit"]).append(STAGE, name, [row])
