"""jobs/benchmarks/report_open.py: the report is a real one, and limits are limits."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayk.reports import load
from tests.markers import thorough
from tests.reports.browser import needs_chromium

pytestmark = thorough

BENCHMARKS = Path(__file__).resolve().parents[2] / "jobs" / "benchmarks"


@pytest.fixture
def job() -> Iterator[Any]:
    path = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("report_open")
    sys.path[:] = path
    sys.modules.pop("report_open", None)


def test_limits_are_of_time_and_size(job: Any) -> None:
    assert job.beyond(6, 10_000_000, 2.0) == []
    assert job.beyond(6, 10_000_001, 2.0) == ["6 requests per cell: 10,000,001 bytes, more than 10,000,000"]
    assert job.beyond(6, 1, 2.01) == ["6 requests per cell: 2.01 s, more than 2"]


@needs_chromium
def test_a_page_is_timed_by_its_own_clock(job: Any, tmp_path: Path) -> None:
    """One that is kept from loading for 0.7 s, by a script before its end."""
    page = job.write_report(tmp_path / "run", 3, 2)
    result = load(tmp_path / "run")
    assert (len(result.cells), len(result.requests)) == (3, 6)
    text = page.read_text(encoding="utf-8")
    assert text.count("</body>") >= 1
    wait = "<script>var end = Date.now() + 700; while (Date.now() < end) {}</script></body>"
    page.write_text(wait.join(text.rsplit("</body>", 1)), encoding="utf-8")
    seconds, paint, cells = job.open_page(page, tmp_path)
    assert 0.7 < seconds < job.WAIT_S
    assert 0 < paint < job.WAIT_S
    assert cells > 3


@needs_chromium
def test_beyond_a_limit_it_exits_with_1(job: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(job, "LIMIT_BYTES", 1000)
    monkeypatch.setattr(job, "NUM_REQUESTS", (2,))
    for arguments, status in (["--check"], 1), ([], 0):
        monkeypatch.setattr(sys, "argv", ["report_open.py", "--cells", "2", "--rounds", "1", *arguments])
        assert job.main() == status
    assert "bytes, more than 1,000" in capsys.readouterr().err


def test_its_help_needs_no_browser() -> None:
    command = [sys.executable, str(BENCHMARKS / "report_open.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--check" in done.stdout
