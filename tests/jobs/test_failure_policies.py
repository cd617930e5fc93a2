"""What jobs/benchmarks/failure_policies.py plants and refuses. No Ray."""

from __future__ import annotations

import argparse

import pytest

from jobs.benchmarks.failure_policies import LENGTHS, MAX_BATCH_TOKENS, MIN_REQUESTS, main, make_spec
from rayk.actors.cell_deployment import faults_of
from rayk.specs import load_spec, plan_cells
from rayk.types.errors import UserError
from tests.specs.models import decoder


@pytest.mark.parametrize("given", [0, 1, 3, MIN_REQUESTS - 1])
def test_too_few_requests_are_refused_with_the_least(given: int) -> None:
    with pytest.raises(UserError, match=f"--requests {given}: at least {MIN_REQUESTS}"):
        main(["--requests", str(given)])


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("num_requests", [MIN_REQUESTS, 7, 9, 24, 100])
def test_every_fault_is_planted_once_where_it_can_strike(mode: str, num_requests: int) -> None:
    # Round robin over two prefill engines, whose steps take MAX_BATCH_TOKENS at the most.
    first = sum(LENGTHS[i % len(LENGTHS)] for i in range(num_requests) if i % 2 == 0)
    for seed in range(12):
        options = argparse.Namespace(
            requests=num_requests,
            seed=seed,
            mode=mode,
            repeats=1,
            max_tokens=24,
            transfer_s=3.0,
            device="cpu",
        )
        cells = [c for c, _ in plan_cells(load_spec(make_spec(options)), decoder(), device="cpu")]
        assert [len(c.faults) for c in cells] == [5, 5, 5, 0]
        cell = cells[0]
        planted = [
            (fault.kind, fault.point, role)
            for role, count in (("prefill", 2), ("decode", 1))
            for index in range(count)
            for fault in faults_of(cell, role, index, 0, 1)
        ]
        assert len(planted) == len(set(planted)) == 5
        reused, killed = cell.faults[3:]
        assert reused.request is not None
        assert killed.step is not None
        assert reused.request % 2 == reused.engine == 1
        assert reused.request < num_requests
        assert (killed.step - 1) * MAX_BATCH_TOKENS < first, "engine 0 comes to that step"
        assert all(1 <= (fault.step or 0) <= num_requests // 2 for fault in cell.faults[:3])
