"""Estimates against brute force, published tables, and processes whose true values are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rayk.bench.statistics import (
    MIN_VALUES,
    are_independent,
    batch_means,
    drift,
    intervals_hold,
    mean,
    num_needed,
    quantile,
    warmup_length,
)
from rayk.reports.intervals import student_t

# Of the usual printed tables (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
T_TABLE = {
    (0.975, 1): 12.706,
    (0.975, 2): 4.303,
    (0.975, 3): 3.182,
    (0.975, 4): 2.776,
    (0.975, 9): 2.262,
    (0.975, 19): 2.093,
    (0.975, 30): 2.042,
    (0.95, 5): 2.015,
    (0.995, 18): 2.878,
    (0.999, 8): 4.501,
}


@pytest.mark.parametrize(("share", "degrees"), T_TABLE)
def test_student_t_is_that_of_the_tables(share: float, degrees: int) -> None:
    assert round(student_t(share, degrees), 3) == T_TABLE[share, degrees]


def ar1(count: int, rho: float, rng: np.random.Generator) -> np.ndarray:
    """Normal values with a mean of 10 and a deviation of 1, each correlated by rho with the one before."""
    noise = rng.normal(0, 1, count + 300)
    values = np.zeros(count + 300)
    for i in range(1, count + 300):
        values[i] = rho * values[i - 1] + noise[i] * math.sqrt(1 - rho**2)
    return values[300:] + 10


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [12, 100, 1000])
def test_a_quantile_is_the_least_value_that_so_many_do_not_exceed(count: int, share: float) -> None:
    values = np.random.default_rng(count).exponential(1.0, count).tolist()
    found = quantile(values, share)
    smaller = [sum(v <= x for v in values) for x in sorted(values)]
    expected = next(x for x, n in zip(sorted(values), smaller, strict=True) if n >= share * count)
    if found is None:
        assert count < num_needed(share) * 1.6
    else:
        assert found.value == expected
        assert found.low <= found.value <= found.high
        assert {found.low, found.high} <= set(values)


@pytest.mark.parametrize(("share", "needed"), [(0.5, 12), (0.9, 58), (0.99, 618)])
def test_percentiles_need_a_sample_that_supports_them(share: float, needed: int) -> None:
    """What the report says of 12, 58 and 618 holds, and a quantile of fewer values is not given: its interval
    would end beyond the largest."""
    assert num_needed(share) == needed
    rng = np.random.default_rng(0)
    for count in (MIN_VALUES, needed // 2, needed - 1):
        assert quantile(rng.permutation(count).tolist(), share) is None
    assert any(quantile(rng.permutation(needed).tolist(), share) is not None for _ in range(50))


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_ends_of_a_quantile_are_order_statistics(share: float) -> None:
    """Independent values: at least as wide as the binomial interval that counting gives."""
    count = 400
    values = np.random.default_rng(3).permutation(count) + 1.0
    found = quantile(values.tolist(), share)
    assert found is not None
    # Smallest interval of ranks around the quantile with a binomial probability of 95%, by summing.
    log = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(count + 1)]
    weight = [
        math.exp(c + k * math.log(share) + (count - k) * math.log(1 - share)) for k, c in enumerate(log)
    ]
    half = next(
        h for h in range(count) if sum(weight[round(share * count) - h : round(share * count) + h]) >= 0.95
    )
    assert found.low <= share * count - half + 2
    assert found.high >= share * count + half - 2


def test_one_exceedance_in_every_batch_does_not_pass_for_certainty() -> None:
    """Batches that are all alike have no error of their own: that of independent values remains."""
    values = ([1.0] * 4 + [2.0]) * 20
    found = mean(values)
    assert found is not None
    assert found.high - found.low >= 2 * 1.96 * np.std(values, ddof=1) / math.sqrt(len(values))
    assert quantile(([1.0] * 99 + [2.0]) * 2, 0.99) is None


def test_failures_push_percentiles_up() -> None:
    values = np.random.default_rng(5).exponential(1.0, 1000)
    values[::20] = math.inf
    median, p90, p99 = (quantile(values.tolist(), share) for share in (0.5, 0.9, 0.99))
    kept = sorted(v for v in values if v < math.inf)
    assert median is not None
    assert median.value == kept[499]
    assert p90 is not None
    assert p90.value == kept[899]
    assert p99 is None or p99.value == math.inf


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_intervals_hold_the_truth_as_often_as_they_say(rho: float) -> None:
    """Of 200 runs of 1,000 values; naive intervals of the correlated ones hold it half as often."""
    rng = np.random.default_rng(11)
    num_right = {"mean": 0, "p90": 0, "naive": 0}
    given = 0
    for _ in range(200):
        values = ar1(1000, rho, rng)
        center, p90 = mean(values.tolist()), quantile(values.tolist(), 0.9)
        assert center is not None
        num_right["mean"] += center.low <= 10 <= center.high
        num_right["naive"] += abs(values.mean() - 10) <= 1.96 * values.std(ddof=1) / math.sqrt(1000)
        if p90 is not None:
            given += 1
            num_right["p90"] += p90.low <= 10 + 1.281552 <= p90.high
    assert given >= 180
    assert num_right["mean"] >= 0.9 * 200
    assert num_right["p90"] >= 0.88 * given
    assert rho < 0.9 or num_right["naive"] <= 0.5 * 200


def test_batches_are_contiguous_and_joined_until_neighbours_are_independent() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(0, 1, 103)
    means = batch_means(values)
    sizes = [len(part) for part in np.array_split(np.arange(103), len(means))]
    starts = np.cumsum([0, *sizes])
    for i, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        assert means[i] == pytest.approx(sum(values[start : start + size]) / size, rel=1e-12)
    assert len(means) == 20
    slow = np.repeat(rng.normal(0, 1, 10), 20)
    assert not are_independent(np.array([part.mean() for part in np.array_split(slow, 20)]))
    assert len(batch_means(slow)) in (5, 10)


def test_a_queue_that_grows_is_a_drift_and_noise_is_not() -> None:
    rng = np.random.default_rng(4)
    growing = np.linspace(1, 3, 200) + rng.normal(0, 0.2, 200)
    share = drift(growing.tolist())
    assert share == pytest.approx(1.0, abs=0.1)
    assert drift(growing[::-1].tolist()) == pytest.approx(-1.0, abs=0.1)
    false_alarms = sum(drift(rng.exponential(1, 200).tolist()) is not None for _ in range(200))
    assert false_alarms <= 10
    assert drift([1.0] * 200) is None
    assert drift([1.0, math.inf] * 100) is None


def test_warmup_is_found_and_steady_values_are_kept() -> None:
    rng = np.random.default_rng(6)
    for _ in range(20):
        steady = 10 + rng.exponential(1, 400)
        warm = steady.copy()
        warm[:40] += np.linspace(20, 4, 40)
        assert 35 <= warmup_length(warm.tolist()) <= 80
    kept = [warmup_length((10 + rng.exponential(1, 400)).tolist()) for _ in range(100)]
    assert sum(cut > 0 for cut in kept) <= 15
    assert max(kept) <= 100
    assert warmup_length([]) == 0
    assert warmup_length([1.0] * 9) == 0


def test_few_values_have_no_interval() -> None:
    assert mean([1.0] * (MIN_VALUES - 1)) is None
    assert quantile([1.0] * (MIN_VALUES - 1), 0.5) is None
    found = mean([2.0] * MIN_VALUES)
    assert found is not None
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_a_trend_within_all_batches_is_told() -> None:
    assert not intervals_hold(np.linspace(0, 1, 100).tolist())
    assert intervals_hold(np.random.default_rng(1).normal(0, 1, 100).tolist())
    assert intervals_hold([1.0, 2.0])
