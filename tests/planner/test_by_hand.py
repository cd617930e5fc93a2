"""Simulated plans whose numbers are worked out here by other means: queues of one server, and data sheets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rayk.costs.table import Gap, GapTable, LinearCost
from rayk.planner.candidates import Candidate
from rayk.planner.plan import Plan
from rayk.planner.traffic import Traffic
from rayk.planner.trial import PlanWorld, Trial, run_trial
from rayk.sched.arrivals import due_times
from rayk.simulate.engine import POLL_NS
from rayk.specs.plan import TrafficSpec
from rayk.specs.traces import TraceSpec
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


def test_a_lone_request_takes_the_sum_of_its_stages_and_all_of_them_grow_with_costs(tmp_path: Path) -> None:
    """A prompt of one step, a hand-over, and five decode steps; every stage has a cost of its own."""
    costs = book(decode={"one": 8.0}, prefill={"one": 40.0})
    engine = costs.any_engine
    assert engine is not None
    ticket, verify = LinearCost(fixed_ns=7e6), LinearCost(fixed_ns=5e6)
    engine = replace(
        engine, host_ns=2e6, request_host_ns=1e6, commands={"MakeTicket": ticket, "verify": verify}
    )
    ways = GapTable(dispatch=Gap(quantiles=(3e6,)), handover=Gap(quantiles=(4e6,)))
    costs = replace(costs, any_engine=engine, gaps=ways)
    plan = make_plan(
        tmp_path,
        costs,
        slo={"ttft": "400ms", "tpot": "100ms"},
        search={"mode": "disaggregated", "num_prefill": 1, "num_decode": 1},
    )
    world, candidate = trials_of(plan)
    asked = Trial(candidate=candidate, rate=0.5, num_requests=4)
    found, slowed = run_trial(world, asked), run_trial(world, replace(asked, slowed=2.0))
    # A turn of the host is 2 ms and 1 ms for its request. The prompt's turn has 7 ms of a ticket, too; the
    # reader posts, waits 1 ms, and verifies for 5 ms before its five turns.
    ttft_ms, decode_ms = 3.0 + 43.0, 4.0 + 1.0 + 5.0 + 5 * 11.0
    slack_ms = 4 * POLL_NS / 1e6  # an engine with nothing to run looks again after so long
    assert found.ttft_ms[0] == pytest.approx(ttft_ms, abs=0.01)
    assert 5 * found.tpot_ms[0] == pytest.approx(7.0 + decode_ms, abs=slack_ms)
    assert slowed.ttft_ms[0] == pytest.approx(2 * found.ttft_ms[0], abs=0.01)
    assert slowed.tpot_ms[0] == pytest.approx(2 * found.tpot_ms[0], abs=slack_ms / 5)


def test_an_estimate_is_the_sum_of_its_steps(tmp_path: Path) -> None:
    """Prompts of 32 tokens, two to a step, and 6 tokens of output, the first of which is the prompt's."""
    costs = book(decode={"one": 2.0, "requests": 1.0, "seen": 0.01}, prefill={"one": 2.0, "tokens": 0.2})
    plan = make_plan(tmp_path, costs, search={"mode": "disaggregated"}, slo={"ttft": "60ms", "tpot": "6ms"})
    (family,) = plan.inputs.space.families
    rates = family.rates
    assert rates.prefill == pytest.approx(1e3 / ((2.0 + 0.2 * 64) / 2))
    assert rates.ttft_ms == pytest.approx(2.0 + 0.2 * 32)
    batch = 2  # of three a step takes 2 + 3 * (1 + 0.01 * 36) > 6 ms
    step_ms = 2.0 + batch * (1.0 + 0.01 * (32 + 3 + 1))
    assert rates.tpot_ms == pytest.approx(step_ms)
    assert rates.decode == pytest.approx(batch * 1e3 / (5 * step_ms))
    assert rates.e2e_s == pytest.approx((rates.ttft_ms + 5 * step_ms) / 1e3)


def test_a_long_prompt_is_estimated_by_its_chunks(tmp_path: Path) -> None:
    costs = book(decode={"one": 1.0}, prefill={"one": 2.0, "pairs": 0.001})
    plan = make_plan(
        tmp_path,
        costs,
        search={"mode": "disaggregated"},
        traffic={"input_tokens": 160, "output_tokens": 2},
    )
    (family,) = plan.inputs.space.families
    pairs = [64 * 65 // 2, 64 * 64 + 64 * 65 // 2, 32 * 128 + 32 * 33 // 2]
    assert family.rates.ttft_ms == pytest.approx(sum(2.0 + 0.001 * n for n in pairs))
    third = 2.0 + 0.001 * (64 * 128 + 64 * 65 // 2)  # half of a step that the next prompt fills up
    assert 1e3 / family.rates.prefill == pytest.approx(4.0 + 0.001 * sum(pairs[:2]) + third / 2)


def test_what_a_trace_shares_is_counted_in_blocks(tmp_path: Path) -> None:
    """The second prompt has two blocks of the first, the third all of its own 64 tokens but the last, and the
    fourth a block that stands behind another one."""
    rows = [([1, 2, 3], 1280), ([1, 2, 4], 1280), ([1, 2], 1024), ([9, 2], 1024)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 500 * n, "input_length": length, "output_length": 4, "hash_ids": ids})
            + "\n"
            for n, (ids, length) in enumerate(rows)
        )
    )
    spec = TrafficSpec(trace=TraceSpec(file=str(trace), block_tokens=32))
    shared = Traffic(spec, vocab_size=512, has_prefixes=True).profile(0.9)
    assert shared.cached_tokens * 4 == 64 + 63
