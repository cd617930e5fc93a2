"""Simulated plans whose numbers are worked out here by other means: queues of one server, and data sheets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rayk.planner.candidates import Candidate
from rayk.planner.plan import Plan
from rayk.planner.trial import PlanWorld, Trial, run_trial
from rayk.sched.arrivals import due_times
from tests.planner.plans import book, make_plan

STEP_MS = 10.0
LIMIT_MS = 45.0
RATE = 70.0


def trials_of(plan: Plan) -> tuple[PlanWorld, Candidate]:
    """Return the world of a plan, and its only candidate."""
    inputs = plan.inputs
    (candidate,) = [c for f in inputs.space.families for c in inputs.space.counts(f)]
    return PlanWorld(spec=inputs.spec, config=inputs.config, costs=inputs.costs), candidate


def one_server(folder: Path) -> tuple[PlanWorld, Candidate]:
    """Make a plan of an engine that takes prompts one by one, each in one step of the same length."""
    costs = book(decode={"one": STEP_MS}, prefill={"one": STEP_MS})
    plan = make_plan(
        folder,
        costs,
        traffic={"input_tokens": 64, "output_tokens": 1, "process": "poisson"},
        slo={"ttft": f"{LIMIT_MS}ms"},
        search={"mode": "aggregated", "num_prefill": 1, "max_batch_tokens": [64], "max_seqs": [64]},
    )
    return trials_of(plan)


def waits_of(num: int, step_ms: float, seed: int, rate: float = RATE) -> NDArray[np.float64]:
    """Return each request's time in a queue of one server [num], in ms: Lindley's recursion."""
    free, found = 0.0, []
    for due_ns in due_times("poisson", rate=rate, num_requests=num, burstiness=1.0, seed=seed):
        free = max(free, due_ns / 1e6) + step_ms
        found.append(free - due_ns / 1e6)
    return np.array(found[num // 10 :])  # the first tenth is not counted


def erlang(wait_ms: float, rate: float, step_ms: float) -> float:
    """Return the share of requests that wait no longer in M/D/1 (A. K. Erlang, 1909)."""
    load = rate / 1e3
    terms = [
        (-load * (wait_ms - k * step_ms)) ** k / math.factorial(k) * math.exp(load * (wait_ms - k * step_ms))
        for k in range(int(wait_ms // step_ms) + 1)
    ]
    return (1 - load * step_ms) * math.fsum(terms)


@pytest.mark.parametrize(
    ("changes", "step_ms", "rate"),
    [({}, 10.0, RATE), ({"slowed": 1.1}, 11.0, RATE), ({"rate": 0.8 * RATE}, 10.0, 0.8 * RATE)],
)
def test_a_queue_of_one_server_is_what_lindley_says(
    tmp_path: Path, changes: dict[str, Any], step_ms: float, rate: float
) -> None:
    world, candidate = one_server(tmp_path)
    asked: dict[str, Any] = {"candidate": candidate, "rate": RATE, "num_requests": 400, "seed": 3} | changes
    found = run_trial(world, Trial(**asked))
    times = waits_of(400, step_ms, 3, rate)
    assert found.num_requests == len(times) == 360
    assert found.ttft_ms == pytest.approx(np.percentile(times, (50, 90)), abs=1e-3)
    assert found.good_share == np.mean(times <= LIMIT_MS)
    assert found.missed["ttft"] == pytest.approx(np.mean(times > LIMIT_MS))
    assert found.goodput == found.good_share * rate
    assert found.busy["prefill"] == pytest.approx(rate * step_ms / 1e3, rel=0.05)
    assert 0 < found.good_share < 1


@pytest.mark.thorough
def test_a_long_queue_is_what_erlang_says(tmp_path: Path) -> None:
    world, candidate = one_server(tmp_path)
    found = run_trial(world, Trial(candidate=candidate, rate=RATE, num_requests=20_000, seed=1))
    for share, at_ms in zip((0.5, 0.9), found.ttft_ms, strict=True):
        assert erlang(at_ms - STEP_MS, RATE, STEP_MS) == pytest.approx(share, abs=0.02)
    assert found.good_share == pytest.approx(erlang(LIMIT_MS - STEP_MS, RATE, STEP_MS), abs=0.02)
