"""Goodness-of-fit tests, without SciPy. All data is seeded: a test that passes once passes always."""

from __future__ import annotations

import torch

P_VALUE = 1e-3
"""Below this a fit is refused: right code fails one choice of seeds in a thousand."""
KOLMOGOROV = 1.95
"""D * sqrt(n) beyond which P_VALUE is reached: 2 exp(-2 * 1.95^2) = 1e-3."""


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How likely counts as far off as these are, were they drawn from `probabilities`; both [V].

    Outcomes expected fewer than 5 times are taken together, as the test demands.
    """
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    rare = expected < 5
    seen = torch.cat((counts[~rare].double(), counts[rare].double().sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    degrees = torch.tensor(float(len(expected) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def kolmogorov(values: torch.Tensor) -> float:
    """D * sqrt(n) of `values` [n] against the uniform distribution on (0, 1)."""
    n = len(values)
    ordered = values.double().sort().values
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())) * n**0.5
