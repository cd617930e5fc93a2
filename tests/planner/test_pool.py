"""A pool of simulations: what is known is not run again, and results come in the order of what was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rayk.planner import pool
from rayk.planner.pool import TrialPool
from rayk.planner.trial import PlanWorld, Trial, TrialResult, run_trial
from tests.planner.plans import book, make_plan

COSTS = book(decode={"one": 2.0, "requests": 1.0}, prefill={"one": 2.0, "tokens": 0.2})


class Noted:
    """Runs trials, and notes what was simulated and what was told of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.simulated: list[tuple[object, ...]] = []
        self.told: list[TrialResult] = []
        monkeypatch.setattr(pool, "run_trial", self.run)

    def run(self, world: PlanWorld, trial: Trial) -> TrialResult:
        candidate, part = trial.simulated
        what = candidate.plan_id, part * trial.rate, trial.num_requests, trial.seed, trial.slowed
        self.simulated.append(what)
        return run_trial(world, trial)

    def stage(self, text: str, num_trials: int) -> None:
        """Implements SearchProgress, as `done` does."""

    def done(self, result: TrialResult) -> None:
        self.told.append(result)


def test_a_search_runs_no_simulation_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few requests are asked for that the shortest simulation is the longest one, too."""
    noted = Noted(monkeypatch)
    asked = {"rate": 30, "process": "poisson", "num_requests": 20}
    plan = make_plan(tmp_path, COSTS, traffic=asked, search={"mode": "aggregated", "num_prefill": [3, 4]})
    assert plan.run(progress=noted).is_met
    assert len(noted.told) > len(noted.simulated) == len(set(noted.simulated)) > 5


def trials(folder: Path) -> tuple[PlanWorld, list[Trial]]:
    """Three trials of fleets, the first and the last of which are simulated by one and the same."""
    plan = make_plan(folder, COSTS, cpu={"slots": 96}, search={"mode": "aggregated", "num_prefill": [48, 96]})
    (family,) = plan.inputs.space.families
    fleets = list(plan.inputs.space.counts(family))
    world = PlanWorld(spec=plan.inputs.spec, config=plan.inputs.config, costs=plan.inputs.costs)
    made = [
        Trial(candidate=c, rate=rate, num_requests=50, stand_in=c.shrunk(24))
        for c, rate in ((fleets[0], 100.0), (fleets[0], 50.0), (fleets[1], 200.0))
    ]
    return world, made


def test_a_smaller_fleet_that_stands_for_two_is_simulated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    world, asked = trials(tmp_path)
    with TrialPool(world, num_jobs=1) as runs:
        found = runs.run(asked, on_result=noted.done)
        again = runs.run(asked[::-1], on_result=noted.done)
    assert len(noted.simulated) == runs.num_run == 2
    assert len(noted.told) == 6
    assert found == again[::-1]
    assert found == [run_alone(world, trial, like) for trial, like in zip(asked, found, strict=True)]


def run_alone(world: PlanWorld, trial: Trial, like: TrialResult) -> TrialResult:
    """Simulate a trial by itself; it may take another processor time."""
    return replace(run_trial(world, trial), cpu_s=like.cpu_s)


@pytest.mark.parametrize(
    ("is_late", "known", "num_found"),
    [(False, [], 3), (True, [], 1), (True, [1], 2), (True, [2], 1), (True, [0], 2)],
)
def test_results_end_before_the_first_that_there_was_no_time_for(
    tmp_path: Path, is_late: bool, known: Sequence[int], num_found: int
) -> None:
    """One is run all the same; what is known takes no time, but is not told behind one that was left out."""
    world, (first, second, _) = trials(tmp_path)
    asked, now_s = [first, second, replace(second, rate=80.0)], [0.0]
    with TrialPool(world, num_jobs=1, budget_s=5.0, clock=lambda: now_s[0]) as runs:
        for number in known:
            runs.run([asked[number]])
        now_s[0] = 9.0 if is_late else 1.0
        results = runs.run(asked)
    assert [result.trial for result in results] == asked[:num_found]
    assert runs.num_left_out == len(asked) - num_found
