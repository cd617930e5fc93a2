"""jobs/plan_validation.py over a machine that is simulated: its costs are known, so predictions are right."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import plan_validation as job
from jobs.benchmarks.harness import Page
from jobs.quiet_machine import BUSY_SHARE, QuietProgress, busy_share
from rayk.cli.progress import RunProgress
from rayk.costs import CostBook, EngineCosts
from rayk.costs.table import Gap, GapTable, StepTable
from rayk.experiments.planning import plan_experiment
from rayk.reports import ResultWriter
from rayk.simulate import cell_arrivals, cell_row, simulate_cell
from rayk.specs import load_spec
from tests.conftest import CheckpointFactory
from tests.markers import thorough


@pytest.fixture(scope="module")
def all_points() -> list[job.Point]:
    return job.points(load_spec(job.SPEC).spec.matrix)


def test_the_cells_are_those_that_must_be_shown(all_points: list[job.Point]) -> None:
    """Four configurations of two models under three kinds of traffic, at four loads; 12 in the quick form."""
    whole = job.grouped(all_points, quick=False, only="")
    assert [len(of) for of in whole.values()] == [3] * 8
    assert sum(len(rates) for of in whole.values() for _, rates in of) == 96
    assert len({job.name_of(point) for point in all_points}) == 24
    kinds = Counter(job.configuration(point) for point in all_points)
    assert kinds == {"x1": 6, "x2": 6, "TP 2": 6, "P/D 1:1": 6}
    quick = job.grouped(all_points, quick=True, only="")
    assert quick.keys() == whole.keys()
    assert sum(len(rates) for of in quick.values() for _, rates in of) == 12
    only = job.grouped(all_points, quick=False, only="hybrid TP 2")
    assert [job.name_of(point) for point, _ in only.pop("hybrid TP 2")] == [
        f"hybrid TP 2 {kind}" for kind in ("prefill-heavy", "balanced", "decode-heavy")
    ]
    assert not only


def test_cells_wait_for_a_quiet_machine_and_busy_ones_are_noted() -> None:
    """The machine is busy before the second cell for two probes, and after the third, which nobody awaits."""
    shares = iter([0.0, 0.9, 0.5, 0.1, 0.1, 0.6])
    now = iter(range(100))
    watch = QuietProgress(
        RunProgress(), patience_s=30, probe=lambda: next(shares), clock=lambda: float(next(now))
    )
    with watch:
        for cell in ("a", "b", "c"):
            watch.begin(cell)
            watch.end(cell, "PASS", "")
    assert watch.before == {"a": 0.0, "b": 0.1, "c": 0.1}
    assert watch.after == {"a": 0.9, "b": 0.1, "c": 0.6}
    assert watch.busy() == {"a": 0.9, "c": 0.6}


def test_patience_ends() -> None:
    now = iter(range(100))
    watch = QuietProgress(RunProgress(), patience_s=5, probe=lambda: 0.8, clock=lambda: float(next(now)))
    watch.begin("a")
    assert watch.busy() == {"a": 0.8}
    assert BUSY_SHARE < 0.8


def test_the_share_of_busy_cores_is_measured() -> None:
    """While this process spins for all of the probe, at least its own core's share is taken."""

    def spin(seconds: float) -> None:
        import time

        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    assert 0.05 < busy_share(0.2, sleep=spin) <= 1.0


STEP = StepTable(terms=("one", "requests", "tokens"), constants=(3e6, 0.5e6, 0.05e6))
TRUTH = CostBook(
    any_engine=replace(EngineCosts.flat(0.0), decode=STEP, prefill=STEP, host_ns=0.4e6, request_host_ns=2e4),
    gaps=GapTable(dispatch=Gap(quantiles=(1.2e6,))),
)


KINDS = ("requests", "transfers", "steps")


class SimulatedMachine:
    """Stands in for `_Job._run`: cells take what TRUTH says. In the first run of loaded cells others use the
    machine beside one of them."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    def run(self, spec: dict[str, Any], folder: Path) -> tuple[list[str], dict[str, float]]:
        plan = plan_experiment(load_spec(spec), folder, tell=str)
        writer = ResultWriter(folder, spec_yaml=plan.yaml, environment={"devices": {"num_cores": 2}})
        for number, (cell, prompts) in enumerate(plan.cells):
            found = [
                simulate_cell(
                    cell,
                    plan.configs[cell.spec.model],
                    cell_arrivals(cell, prompts, repeat=repeat),
                    TRUTH,
                    repeat=repeat,
                    seed=number,
                )
                for repeat in range(cell.repeat)
            ]
            row = replace(cell_row(cell, found), verdict="PASS")
            rows = ([row for f in found for row in getattr(f, kind)] for kind in KINDS)
            writer.write_cell(row, *rows)
        writer.finish()
        writer.close()
        ids = [cell.cell_id for cell, _ in plan.cells]
        self.runs.append(folder.name)
        return ids, {ids[0]: 0.7} if folder.name == "cells" else {}


def with_tiny_model(folder: Path, model: Path) -> Path:
    """Write the job's spec with a model that takes no time to write."""
    spec = yaml.safe_load(job.SPEC.read_text())
    del spec["checkpoints"]
    spec |= {"model": str(model), "matrix": [m | {"model": [str(model)]} for m in spec["matrix"]]}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


@thorough
def test_a_known_machine_is_predicted_within_the_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: CheckpointFactory
) -> None:
    machine = SimulatedMachine()
    model = checkpoint("llama")
    monkeypatch.setattr(job, "SPEC", with_tiny_model(tmp_path, model))
    monkeypatch.setattr(job._Job, "_run", machine.run)
    asked = argparse.Namespace(
        work=tmp_path, quick=True, only="P/D 1:1 balanced", part=(1, 1), repeats=2, rounds=2, patience=0.0,
        extrapolate=False,
    )  # fmt: skip
    page = Page({})
    assert job.measure(asked, page) == []
    assert machine.runs == [model.name, "capacity", "cells", "cells-again-1"]
    assert job._Job(asked).measured().groups == [f"{model.name} P/D 1:1"], "another call finds it"
    text = page.text
    assert f"| {model.name} P/D 1:1 balanced at 0.7 |" in text
    assert f"| {model.name} P/D 1:1 balanced at 0.85 |" in text
    assert "measured again: others used 70% of the cores" in text
    errors = page.tables["errors"]
    assert len({row["cell_id"] for row in errors}) == 2
    assert max(abs(row["error"]) for row in errors if row["bound"]) < 0.08
    assert all(row["slo"] for row in errors)
    assert (tmp_path / "validation-quick" / "report.html").is_file()
