"""Searches over simulations that are made up: which of them count, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from rayk.planner.plan import UnwatchedSearch
from rayk.planner.pool import OnResult, TrialPool
from rayk.planner.search import PlanTrials, Search
from rayk.planner.trial import Trial, TrialResult
from rayk.planner.why import limit_of
from tests.planner.plans import book, make_plan

COSTS = book(decode={"one": 2.0, "requests": 1.0}, prefill={"one": 2.0, "tokens": 0.2})
Highest = Callable[[Trial], float]


class MadeUp:
    """Stands for TrialPool: a plan keeps the SLO up to the rate that `highest` says of a simulation."""

    def __init__(self, highest: Highest, *, most: int = 10**6) -> None:
        """`most`: simulations that there is time for; beyond, each call has its first one alone."""
        self.highest, self.left = highest, most
        self.trials: list[Trial] = []
        self.left_s = 1e6

    def is_late(self, share: float) -> bool:
        return False

    def run(
        self, trials: Sequence[Trial], *, share: float = 1.0, on_result: OnResult = id
    ) -> list[TrialResult]:
        ran = trials[: max(1, self.left)]
        self.left -= len(ran)
        self.trials += ran
        return [
            TrialResult(
                trial=trial,
                num_requests=trial.num_requests,
                good_share=1.0 if trial.rate <= self.highest(trial) else 0.5,
                missed={"ttft": 0.0 if trial.rate <= self.highest(trial) else 0.5},
                ttft_ms=(1.0, 2.0),
                tpot_ms=(1.0, 2.0),
            )
            for trial in ran
        ]


def searched(
    folder: Path, pool: MadeUp, *, rate: float | None = None, **changes: Any
) -> tuple[Search, PlanTrials]:
    plan = make_plan(folder, COSTS, **changes)
    search = Search(plan.inputs.space, cast(TrialPool, pool), UnwatchedSearch(), rate=rate)
    return search, search.run()


def test_longer_simulations_take_the_place_of_shorter_ones(tmp_path: Path) -> None:
    """Of 200 requests more are good than of 2,000: what short ones promised is not told."""
    pool = MadeUp(lambda trial: 90.0 if trial.num_requests < 2000 else 70.0)
    search, best = searched(tmp_path, pool, traffic={"num_requests": 2000}, search={"mode": "aggregated"})
    assert max(t.rate for t in pool.trials if t.num_requests < 2000) > 80
    assert best.max_rate == pytest.approx(70, rel=0.05)
    assert best.result.trial.rate == best.max_rate <= 70
    assert best.beyond is not None
    assert best.beyond.trial.rate > 70
    assert limit_of(best).text.startswith(f"At {best.beyond.trial.rate:,.3g} requests/s 50% miss TTFT")
    assert search.is_met(best.result)


def test_what_longer_simulations_never_keep_is_no_rate(tmp_path: Path) -> None:
    pool = MadeUp(lambda trial: 90.0 if trial.num_requests < 2000 else 1e-9)
    search, best = searched(tmp_path, pool, traffic={"num_requests": 2000}, search={"mode": "aggregated"})
    assert best.max_rate is None
    assert not search.keeps(best.result)
    assert best.result.num_requests >= 2000


@pytest.mark.parametrize("most", [10**6, 8])
def test_a_plan_s_numbers_are_of_a_simulation_of_its_own(tmp_path: Path, most: int) -> None:
    """Plans of other policies that there was no time for are not among those found."""
    pool = MadeUp(lambda trial: 70.0 + 10 * (trial.candidate.policy == "round_robin"), most=most)
    policies = ["least_loaded", "round_robin"]
    search, best = searched(
        tmp_path,
        pool,
        traffic={"num_requests": 100},
        search={"mode": "aggregated", "policy": policies, "num_prefill": [2, 3]},
    )
    assert all(plan.result.trial.candidate == plan.candidate for plan in search.found.values())
    assert all(plan.result.num_requests for plan in search.found.values())
    assert (best.candidate.policy == "round_robin") == (most > 8)


def test_what_is_known_is_not_simulated_again(tmp_path: Path) -> None:
    pool = MadeUp(lambda trial: 45.0)
    asked = {"rate": 30.0, "num_requests": 2000}
    _, best = searched(tmp_path, pool, rate=30.0, traffic=asked, search={"mode": "aggregated"})
    again = [(t.candidate.plan_id, t.rate) for t in pool.trials if t.num_requests >= 600]
    assert len(set(again)) == len(again)
    assert best.max_rate == pytest.approx(45, rel=0.04)


@pytest.mark.parametrize(("whole", "found"), [(1500.0, 1500.0), (1300.0, 1200.0), (1.0, None)])
def test_a_whole_fleet_has_the_last_word(tmp_path: Path, whole: float, found: float | None) -> None:
    pool = MadeUp(lambda trial: whole if trial.stand_in is None else 1500.0)
    search, best = searched(
        tmp_path,
        pool,
        cpu={"slots": 30},
        traffic={"num_requests": 100},
        search={"mode": "aggregated", "num_prefill": 30},
    )
    assert best.result.trial.stand_in is None
    assert search.keeps(best.result) == (found is not None)
    if found is None:
        assert best.max_rate is None
    else:
        assert best.max_rate == best.result.trial.rate == pytest.approx(found, rel=0.04)
