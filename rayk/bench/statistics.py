"""Estimate from one run whose values depend on each other. Requests that follow each other share queues and
batches, so intervals for independent samples are too narrow. These use batch means: values in order of
arrival are cut into contiguous batches with nearly independent means (Law, Simulation Modeling and Analysis,
9.5.3; 10 to 30 batches: Schmeiser, Operations Research 30, 1982), which are joined until they are
independent. A request that failed is infinitely late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayk.reports.intervals import student_t

CONFIDENCE = 0.95
NUM_BATCHES = 20
MIN_BATCHES = 5
MIN_VALUES = 2 * MIN_BATCHES  # fewer have no interval
WARMUP_BATCH = 5  # values per batch of `warmup_length`: the 5 of MSER-5
WARMUP_SHARE = 0.25  # the largest share that is cut as warm-up
WARMUP_GAIN = 0.8  # a warm-up is cut where at most so much of the squared error is left: less may be chance


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the interval that holds the true one with a confidence of CONFIDENCE."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Estimate | None:
    """Estimate the mean of values in order of arrival, never narrower than for independent values; None of
    fewer than MIN_VALUES."""
    if len(values) < MIN_VALUES:
        return None
    data = np.asarray(values, dtype=np.float64)
    means = batch_means(data)
    half = _t(len(means)) * max(_error(means), _error(data))
    center = float(data.mean())
    return Estimate(center, center - half, center + half)


def quantile(values: Sequence[float], share: float) -> Estimate | None:
    """Estimate the smallest value that at least `share` of the values do not exceed. The interval is of order
    statistics (Woodruff, JASA 47, 1952; Le Boudec, Performance Evaluation, theorem 2.1), with the error of
    the share by batch means of that indicator (Heidelberger and Lewis, Operations Research 32, 1984), at
    least that of independent values. None where an end of the interval is not in the sample; see
    `num_needed`."""
    count = len(values)
    if count < MIN_VALUES:
        return None
    data = np.asarray(values, dtype=np.float64)
    ordered = np.sort(data)
    value = float(ordered[math.ceil(share * count) - 1])
    means = batch_means((data <= value).astype(np.float64))
    error = max(_error(means), math.sqrt(share * (1 - share) / count))
    ranks = _ranks(count, share, _t(len(means)) * error)
    if ranks is None:
        return None
    return Estimate(value, float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1]))


def num_needed(share: float) -> int:
    """Count the independent values that `quantile` needs: 12 for p50, 58 for p90, 618 for p99."""
    count = MIN_VALUES
    while _ranks(count, share, _t(num_batches(count)) * math.sqrt(share * (1 - share) / count)) is None:
        count += 1
    return count


def batch_means(values: np.ndarray) -> np.ndarray:
    """Average contiguous batches of nearly equal size: `num_batches` of them, or as few (MIN_BATCHES at
    least) as make neighbours independent."""
    count = num_batches(len(values))
    means = _means(values, count)
    while count // 2 >= MIN_BATCHES and not are_independent(means):
        count //= 2
        means = _means(values, count)
    return means


def _means(values: np.ndarray, count: int) -> np.ndarray:
    return np.array([batch.mean() for batch in np.array_split(values, count)])


def are_independent(values: np.ndarray) -> bool:
    """Tell whether neighbours are correlated by less than a standard error (1 / sqrt(n), bias -1 / n taken
    out)."""
    rest = values - values.mean()
    total = float(rest @ rest)
    if total == 0:
        return True
    return float(rest[1:] @ rest[:-1]) / total + 1 / len(values) <= 1 / math.sqrt(len(values))


def intervals_hold(values: Sequence[float]) -> bool:
    """Tell whether batches of these values, if there are enough, are independent."""
    if len(values) < MIN_VALUES or not np.all(np.isfinite(values)):
        return True
    return are_independent(batch_means(np.asarray(values, dtype=np.float64)))


def num_batches(num_values: int) -> int:
    """Take NUM_BATCHES, or as many as have two values each."""
    return min(NUM_BATCHES, num_values // 2)


def drift(values: Sequence[float]) -> float | None:
    """Fit a line through the batch means: its growth as a share of their mean, where the slope is significant
    (two-sided t test at 1%); else None."""
    if len(values) < MIN_VALUES or not np.all(np.isfinite(values)):
        return None
    count = num_batches(len(values))
    means = _means(np.asarray(values, dtype=np.float64), count)
    at = np.arange(count) - (count - 1) / 2
    slope = float(at @ means / (at @ at))
    rest = means - means.mean() - slope * at
    error = math.sqrt(float(rest @ rest) / (count - 2) / float(at @ at))
    average = float(means.mean())
    if average <= 0 or abs(slope) <= student_t(0.995, count - 2) * error:
        return None
    return slope * (count - 1) / average


def warmup_length(values: Sequence[float]) -> int:
    """Count the values to cut at the start, by MSER-5 (White, Simulation 69, 1997; White, Cobb and Spratt,
    Winter Simulation Conference 2000): the cut, of at most WARMUP_SHARE, with the least standard error of the
    mean, if the gain reaches WARMUP_GAIN. Values must be finite."""
    means = _blocks(np.asarray(values, dtype=np.float64), WARMUP_BATCH)
    last = int(len(means) * WARMUP_SHARE)
    rests = [means[cut:] for cut in range(last + 1)]
    if len(means) < 2:
        return 0
    errors = [float(((rest - rest.mean()) ** 2).sum()) / len(rest) ** 2 for rest in rests]
    best = int(np.argmin(errors))
    return best * WARMUP_BATCH if errors[best] <= WARMUP_GAIN * errors[0] else 0


def _blocks(values: np.ndarray, size: int) -> np.ndarray:
    count = len(values) // size
    means: np.ndarray = values[: count * size].reshape(count, size).mean(axis=1)
    return means


def _error(values: np.ndarray) -> float:
    """Estimate the standard error of the mean of independent values."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _ranks(count: int, share: float, half: float) -> tuple[int, int] | None:
    """Find the ranks (from 1) of a quantile's interval; None where one is not in the sample."""
    low, high = math.floor(count * (share - half)), math.ceil(count * (share + half)) + 1
    return (low, high) if low >= 1 and high <= count else None


def _t(num_means: int) -> float:
    return student_t((1 + CONFIDENCE) / 2, num_means - 1)
