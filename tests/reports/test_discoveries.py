"""Findings among many ratios: seldom false, and large changes are found with the six requests of a cell."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import numpy as np
import pytest

from rayk.reports import Result, load
from rayk.reports.compare import sections
from rayk.reports.intervals import Sample, intervals, student_within, usual_spread
from rayk.reports.paired import CELL, FALSE_RATE, changes
from tests.markers import one_per, sweep, thorough
from tests.reports.synthetic import write_run

MARGIN = math.log1p(0.05)
NUM_CELLS, NUM_REQUESTS, NUM_RUNS = 60, 6, 200


def draw_samples(
    draw: random.Random, *, slow: int = 0, factor: float = 1.0, shared: float = 0.0
) -> list[Sample]:
    """Of NUM_CELLS cells, the first `slow` times `factor`; a request scatters by 10%, a cell by `shared`."""
    cells = []
    for i in range(NUM_CELLS):
        centre = draw.gauss(0, shared) + (math.log(factor) if i < slow else 0.0)
        cells.append([centre + draw.gauss(0, 0.1) for _ in range(NUM_REQUESTS)])
    spread = usual_spread([statistics.fmean(cell) for cell in cells])
    return [Sample(logs=cell, shared=spread**2) for cell in cells]


def marked(samples: list[Sample]) -> set[int]:
    ends = intervals(samples, MARGIN, FALSE_RATE)
    return {i for i, (low, high) in enumerate(ends) if low > MARGIN or high < -MARGIN}


@thorough
@pytest.mark.parametrize("shared", [0.0, 0.1], ids=["requests alone", "cells, too"])
def test_equal_runs_have_few_findings(shared: float) -> None:
    """Nothing changed: every finding is false, and the rate is the share of runs with any."""
    draw = random.Random(1)
    runs = sum(bool(marked(draw_samples(draw, shared=shared))) for _ in range(NUM_RUNS))
    assert runs <= FALSE_RATE * NUM_RUNS


@thorough
def test_of_what_is_found_few_is_false() -> None:
    """Twelve of sixty cells are three times as slow; the others are as far off as the margin allows."""
    draw, shares, missed = random.Random(2), [], 0
    for _ in range(NUM_RUNS):
        samples = draw_samples(draw, slow=12, factor=3.0)
        shifted = [Sample(logs=[x + MARGIN for x in s.logs]) for s in samples]
        found = marked(shifted)
        missed += len(set(range(12)) - found)
        shares.append(len(found - set(range(12))) / max(1, len(found)))
    assert 0 < statistics.fmean(shares) <= FALSE_RATE
    assert missed == 0


def test_findings_are_those_of_benjamini_and_hochberg() -> None:
    """Against the step-up procedure as it is written: the largest k with p(k) <= k q / m."""
    draw = random.Random(3)
    for _ in range(20):
        samples = draw_samples(draw, slow=20, factor=draw.uniform(1.1, 1.5))
        chances = [
            1 - student_within(max(0.0, abs(s.mean) - MARGIN) / s.error, NUM_REQUESTS - 1) for s in samples
        ]
        order = sorted(range(NUM_CELLS), key=lambda i: chances[i])
        passing = [k for k in range(1, NUM_CELLS + 1) if chances[order[k - 1]] <= k * FALSE_RATE / NUM_CELLS]
        assert marked(samples) == set(order[: max(passing, default=0)])


def test_a_chance_is_students() -> None:
    """Tables of Student's t: 5 degrees of freedom, 2.5706 and 4.0321 two-sided 5% and 1%."""
    logs = np.array([-1.0, 1.0, -1.0, 1.0, 0.0, 0.0])
    error = logs.std(ddof=1) / math.sqrt(6)
    for t, chance in ((2.5706, 0.05), (4.0321, 0.01)):
        sample = Sample(logs=(logs + t * error + 0.25).tolist())
        assert sample.chance(0.25) == pytest.approx(chance, rel=1e-3)
        assert Sample(logs=(-logs - t * error - 0.25).tolist()).chance(0.25) == pytest.approx(
            chance, rel=1e-3
        )


def test_the_usual_spread_is_that_of_most() -> None:
    draw = random.Random(4)
    spreads = [usual_spread([draw.gauss(0.3, 0.2) for _ in range(60)]) for _ in range(200)]
    assert statistics.fmean(spreads) == pytest.approx(0.2, rel=0.2)
    values = [draw.gauss(0, 0.01) for _ in range(11)]
    assert usual_spread([*values, *(100.0 + v for v in range(9))]) < 0.05
    assert usual_spread([0.0, 5.0]) == 0.0


@pytest.fixture
def small(tmp_path: Path) -> Result:
    """18 cells of six requests, as `make experiment` has."""
    write_run(tmp_path / "a", failures=False)
    return load(tmp_path / "a")


def slower(base: Result, factor: float, noise: float) -> Result:
    """A copy whose times scatter by `noise`, those of one cell times `factor`."""
    draw = np.random.default_rng(0)
    requests = base.requests.copy()
    is_slow = requests["cell_id"] == base.cells["cell_id"].iloc[4]
    for column in ("ttft_ms", "tpot_ms", "e2e_ms"):
        requests[column] *= np.exp(draw.normal(0, noise, len(requests))) * np.where(is_slow, factor, 1.0)
    return Result(cells=base.cells, requests=requests, transfers=base.transfers)


@sweep(2)
@one_per()
@pytest.mark.parametrize(("factor", "noise"), [(3.0, 0.0), (3.0, 0.1), (1.5, 0.03), (1 / 3, 0.1)])
def test_a_slow_cell_of_six_requests_is_found(small: Result, factor: float, noise: float) -> None:
    other = slower(small, factor, noise)
    found = [
        c
        for c in changes(small, other)
        if c.level == CELL and c.verdict not in ("the same", "no change seen")
    ]
    cell = small.cells["cell_id"].iloc[4]
    verdict = "regression" if factor > 1 else "improvement"
    assert {(c.subject, c.metric.name, c.verdict) for c in found} == {
        (cell, name, verdict) for name in ("TTFT", "TPOT", "E2E")
    }
    for change in found:
        assert change.num_pairs == NUM_REQUESTS
        assert change.low is not None
        assert change.high is not None
        assert change.low <= factor * 1.0001
        assert change.high >= factor * 0.9999
    [section] = [s for s in sections([small, other]) if s.title == "Cells that changed"]
    assert len(section.rows) == 3
    assert section.note.startswith("3 changed. ")


def test_a_large_change_that_scatters_is_unsure(small: Result) -> None:
    """Six ratios from 0.4 to 6: twice as slow in the mean, and by chance."""
    other = slower(small, 1.0, 0.02)
    is_slow = other.requests["cell_id"] == small.cells["cell_id"].iloc[4]
    other.requests.loc[is_slow, "ttft_ms"] *= [0.4, 6.0, 0.5, 5.0, 3.0, 3.5]
    [section] = [s for s in sections([small, other]) if s.title == "Cells that changed"]
    assert [[row[0], row[1], row[-1]] for row in section.rows] == [
        [small.cells["cell_id"].iloc[4], "TTFT, ms", "unsure"]
    ]
    assert section.note.startswith("Nothing is known to have changed. ")
    assert [chips[-1] for chips in section.chips] == ["NEAR_TIE"]
