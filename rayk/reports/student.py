"""Student's t distribution, for intervals of means."""

from __future__ import annotations

import math


def student_t(share: float, degrees: int) -> float:
    """The quantile of Student's t distribution, share in (0.5, 1), by bisection of its distribution function
    (Abramowitz and Stegun, 26.7.3 and 26.7.4: a finite sum for whole degrees of freedom)."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, degrees) < 2 * share - 1 else (low, middle)
    return (low + high) / 2


def student_within(t: float, degrees: int) -> float:
    """Probability that a t-distributed value lies within -t and t."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    total, term = 0.0, cosine if is_odd else 1.0
    for k in range(1 if is_odd else 0, degrees - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
