"""Intervals of means and medians, and of many ratios at once with a bound on the share of false findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_VALUES = 4  # fewer show too little of how much they scatter
_LEAST_ERROR = 1e-6  # equal values do not make the mean of logarithms exact
_NORMAL_QUARTILE = 0.6744897501960817


def student_t(share: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, share in (0.5, 1), by bisection of its distribution
    function (Abramowitz and Stegun, 26.7.3 and 26.7.4: a finite sum for whole degrees of freedom)."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, degrees) < 2 * share - 1 else (low, middle)
    return (low + high) / 2


def student_within(t: float, degrees: int) -> float:
    """Return the probability that a t-distributed value lies within -t and t."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    total, term = 0.0, cosine if is_odd else 1.0
    for k in range(1 if is_odd else 0, degrees - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Bound the median of the values' distribution, whatever it is, by order statistics (sign test); None of
    too few."""
    count = len(values)
    outside, rank = 0.0, 0
    # P(fewer than `rank` + 1 of `count` lie below the median), on each side. By logarithms: from 1,030 values
    # on, the number of combinations is no float.
    while rank < count // 2:
        log_binomial = math.lgamma(count + 1) - math.lgamma(rank + 1) - math.lgamma(count - rank + 1)
        more = outside + math.exp(log_binomial - count * math.log(2))
        if 2 * more > 1 - confidence:
            break
        outside, rank = more, rank + 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Holds at least MIN_VALUES logarithms of ratios, and the variance of their mean that they share by
    chance."""

    logs: Sequence[float]
    shared: float = 0.0

    @property
    def mean(self) -> float:
        return float(np.mean(self.logs))

    @property
    def degrees(self) -> int:
        return len(self.logs) - 1

    @property
    def error(self) -> float:
        own = float(np.var(self.logs, ddof=1)) / len(self.logs)
        return max(_LEAST_ERROR, math.sqrt(own + self.shared))

    def chance(self, margin: float) -> float:
        """Bound twice the chance of a mean so far out if the true one is within the margin (Student's t)."""
        beyond = abs(self.mean) - margin
        return 1.0 if beyond <= 0 else 1 - student_within(beyond / self.error, self.degrees)


def intervals(samples: Sequence[Sample], margin: float, rate: float) -> list[tuple[float, float]]:
    """Give an interval for each true mean. Those wholly beyond the margin are what Benjamini and Hochberg
    find at this false discovery rate; the others keep the rate, too (Benjamini and Yekutieli, 2005)."""
    chances = sorted(sample.chance(margin) for sample in samples)
    total = len(chances)
    found = max((i for i, chance in enumerate(chances, 1) if chance <= rate * i / total), default=0)
    error = rate * max(1, found) / max(1, total)
    ends = []
    for sample in samples:
        half = student_t(1 - error / 2, sample.degrees) * sample.error
        ends.append((sample.mean - half, sample.mean + half))
    return ends


def usual_spread(values: Sequence[float]) -> float:
    """Estimate the standard deviation of the middle of the values from the shortest interval that holds half
    of them, as for a normal distribution; outliers do not count."""
    ordered = np.sort(np.asarray(values, dtype=float))
    half = (len(ordered) + 1) // 2
    if half < 2:
        return 0.0
    widths = ordered[half - 1 :] - ordered[: len(ordered) - half + 1]
    return float(widths.min()) / 2 / _NORMAL_QUARTILE
