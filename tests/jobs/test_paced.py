"""jobs/paced.py over fleets that are simulated: gaps and reads are known, so predictions are right."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import paced as job
from jobs.benchmarks.harness import Page
from rayk.costs.book import CostBook
from rayk.costs.table import Gap, GapTable, LinearCost, ReadCosts, TransferTable, read_name
from rayk.experiments.planning import plan_experiment
from rayk.planner.validate import paced_book
from rayk.reports import Result, ResultWriter, load
from rayk.simulate.arrivals import cell_arrivals
from rayk.simulate.outcome import cell_row
from rayk.simulate.run import simulate_cell
from rayk.specs import Cell, load_spec
from tests.conftest import CheckpointFactory
from tests.markers import thorough


def asked_for(work: Path, **changes: Any) -> argparse.Namespace:
    given = {
        "pace": 2.0,
        "part": (1, 1),
        "repeats": 1,
        "only": "",
        "costs": None,
        "quick": False,
        "once": False,
    }
    return argparse.Namespace(work=work, **(given | changes))


def names(work: Path, **changes: Any) -> list[str]:
    return [job.name_of(point) for point in job.FleetJob(asked_for(work, **changes)).own]


def test_the_cells_are_those_that_must_be_shown(tmp_path: Path) -> None:
    """Fleets of 4, 8 and 16 engines at ratios 1:3, 1:1 and 3:1 under three policies."""
    whole = names(tmp_path)
    assert len(set(whole)) == len(whole) == 27
    assert Counter(name.split()[0] for name in whole) == {"4": 9, "8": 9, "16": 9}
    ratios = [tuple(map(int, name.split()[2].split(":"))) for name in whole]
    assert Counter(prefill / decode for prefill, decode in ratios) == {1 / 3: 9, 1: 9, 3: 9}
    assert len({name.split()[3] for name in whole}) == 3
    parts = [names(tmp_path, part=(number, 4)) for number in range(1, 5)]
    assert [name for part in parts for name in part] == whole
    assert names(tmp_path, only="8 engines 2:6") == [n for n in whole if n.startswith("8 engines 2:6")]


def test_a_pace_slows_requests_and_deadlines_as_much_as_steps(tmp_path: Path) -> None:
    slow, fast = (job.FleetJob(asked_for(tmp_path, pace=pace)) for pace in (4.0, 1.0))
    fours, ones = ([j.spec_of([point]) for point in j.own] for j in (slow, fast))
    for of_four, of_one in zip(fours, ones, strict=True):
        rates = [spec["matrix"][0]["arrival.rate"][0] for spec in (of_four, of_one)]
        assert rates[0] * 4 == rates[1]
        assert of_four["engine"] == of_one["engine"] | {"pace": 4.0}
        assert all(of_four["deadlines"][name] == 4 * limit for name, limit in of_one["deadlines"].items())
    quick = job.FleetJob(asked_for(tmp_path, quick=True))
    assert {quick.spec_of([p])["matrix"][0]["prompts.random.count"][0] for p in quick.own} == {12, 24, 48}


class SimulatedFleets:
    """Stands in for FleetJob.run: engines keep the times of their tables, and what is between them is known.
    One cell of each first run does not keep its pace."""

    def __init__(self) -> None:
        self.runs: dict[str, int] = {}

    def run(self, spec: dict[str, Any], folder: Path) -> tuple[list[str], Result]:
        plan = plan_experiment(load_spec(spec), folder, resume=True, tell=str)
        if folder.is_dir():
            return [cell.cell_id for cell, _ in plan.cells], load(folder)
        environment = {"devices": {"num_cores": 2}}
        writer = ResultWriter(folder, spec_yaml=plan.yaml, environment=environment)
        for number, (cell, prompts) in enumerate(plan.cells):
            found = simulate_cell(
                cell,
                plan.configs[cell.spec.model],
                cell_arrivals(cell, prompts),
                paced_book(_truth(cell), cell),
            )
            is_late = folder.name.startswith("cells") and not number
            row = replace(cell_row(cell, [found]), verdict="OUT_OF_PACE" if is_late else "PASS")
            row.measured.update(late_p99_share=0.3 if is_late else 0.02, machine_busy_share=0.4)
            writer.write_cell(row, found.requests, found.transfers, found.steps)
        writer.finish()
        writer.close()
        self.runs[folder.name] = len(plan.cells)
        return [cell.cell_id for cell, _ in plan.cells], load(folder)


def _truth(cell: Cell) -> CostBook:
    assert cell.decode is not None
    reads = ReadCosts(post=LinearCost(fixed_ns=4e5, byte_ns=0.2), wait=LinearCost(fixed_ns=2e5))
    return replace(
        CostBook.load(cell.prefill.costs),
        gaps=GapTable(dispatch=Gap(quantiles=(6e6,)), handover=Gap(quantiles=(9e6,))),
        transfers=TransferTable(reads={read_name(cell.prefill, cell.decode): reads}),
    )


@thorough
def test_known_fleets_are_predicted_and_ranked_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: CheckpointFactory
) -> None:
    spec = yaml.safe_load(job.SPEC.read_text())
    del spec["checkpoints"]
    (tmp_path / "paced.yaml").write_text(yaml.safe_dump(spec | {"model": str(checkpoint("qwen3"))}))
    monkeypatch.setattr(job, "SPEC", tmp_path / "paced.yaml")
    fleets = SimulatedFleets()
    monkeypatch.setattr(job.FleetJob, "run", lambda _, spec, folder: fleets.run(spec, folder))
    page = Page({})
    assert job.measure(asked_for(tmp_path / "work", part=(1, 9), quick=True), page) == []
    assert fleets.runs == {"gaps": 2, "cells-4-1-of-9": 3, "again-cells-4-1-of-9": 1}
    assert "Left out" not in page.text, "each was measured again"
    errors = page.tables["errors"]
    assert len({row["cell_id"] for row in errors}) == 3, "those that were measured again count once"
    for row in errors:
        if row["metric"].startswith(("ttft", "tpot")):
            assert abs(row["error"]) < 0.02, row
    assert page.text.count("| 4 engines 1:3 round_robin |") == 2
