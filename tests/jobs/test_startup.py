"""jobs/benchmarks/startup.py: medians of stages, whose they are, and the limit. No Ray."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.benchmarks.harness import Page
from rayk.experiments import startup as clock

BENCHMARKS = Path(__file__).resolve().parents[2] / "jobs" / "benchmarks"


@pytest.fixture
def job() -> Iterator[Any]:
    path = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("startup")
    sys.path[:] = path
    sys.modules.pop("startup", None)


def _found(ray_s: float) -> dict[str, Any]:
    stages = [
        {"stage": clock.PLAN, "wall_s": 1.0, "cpu_s": 0.5},
        {"stage": "starting Ray", "wall_s": ray_s, "cpu_s": ray_s / 10},
        {"stage": clock.SENT, "wall_s": 0.25, "cpu_s": None},
    ]
    ranks = {"prefill0": [{"start": ray_s, "load": 0.5, "transport": 0.25}]}
    return {"first_request_s": 1.25 + ray_s, "stages": stages, "rank_cpu_s": ranks}


def test_medians_are_of_the_runs_after_the_fresh_one(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([30.0, 8.0, 9.0, 2.0, *([99.0] * 4)])
    asked: list[bool] = []

    def started(spec: Path, out: Path, *, is_fresh: bool) -> dict[str, Any]:
        assert "prefill: {tp: 1}" in spec.read_text()
        asked.append(is_fresh)
        return _found(next(runs))

    monkeypatch.setattr(job, "started", started)
    monkeypatch.setattr(
        job, "_repeated", lambda script, rounds: [[1.0, 2.0, 4.0][: 2 + ("ray.init" in script)]] * rounds
    )
    page = Page({})
    options = job.argparse.Namespace(rounds=3, model="some/model")
    missed = job.fill(options, page)
    assert asked == [True, False, False, False] * 2
    assert "| starting Ray | 30.00 | 8.00 | 2.00 | 0.80 | Ray, and its import |" in page.text
    assert "| **first request** | 31.25 | 9.25 | 3.25 |" in page.text
    assert "| prefill0 | 8.00 | 0.50 | 0.25 |" in page.text
    assert "| **all** | 7.00 | 7.00 |" in page.text
    assert missed == ["some/model: 100.2 s until the first request, more than 10"]


def test_every_stage_that_a_run_tells_has_an_owner(job: Any) -> None:
    """Words that the run uses for its stages, as they stand in its code."""
    root = Path(__file__).resolve().parents[2] / "rayk"
    code = "".join(
        (root / name).read_text()
        for name in ("experiments/run.py", "actors/coordinator.py", "actors/cell_run.py")
    )
    words = {name for name in job.WHOSE if f'"{name}"' in code}
    assert words == set(job.WHOSE) - {clock.PLAN, clock.IMPORTS, clock.MACHINE, clock.SENT}
    assert code.count("progress.phase(") == 4
    assert code.count("moments[") == 3
