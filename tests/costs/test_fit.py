"""Fits find what was planted; NNLS agrees with brute force over the sets of terms, and with scipy's."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from rayk.costs.fit import _places, fit, nnls
from rayk.costs.hull import place_of
from rayk.costs.table import quantile


def _by_subsets(terms: np.ndarray, values: np.ndarray) -> float:
    """Return the least sum of squares that non-negative constants reach, each set of terms tried."""
    best = float(values @ values)
    for size in range(1, terms.shape[1] + 1):
        for chosen in combinations(range(terms.shape[1]), size):
            found = np.linalg.lstsq(terms[:, chosen], values, rcond=None)[0]
            if (found >= 0).all():
                best = min(best, float(((terms[:, chosen] @ found - values) ** 2).sum()))
    return best


def _problems(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw problems: some with terms alike, a term of zeros, fewer samples than terms, units far apart."""
    rng = np.random.default_rng(3)
    drawn_ = []
    for number in range(count):
        rows, columns = int(rng.integers(2, 20)), int(rng.integers(1, 7))
        terms = rng.normal(size=(rows, columns)) if number % 2 else rng.uniform(0, 1, (rows, columns))
        if number % 3 == 0 and columns > 2:
            terms[:, 1] = terms[:, 0] * 2
        if number % 5 == 0:
            terms[:, -1] = 0
        terms = terms * 10.0 ** rng.integers(-3, 4, columns)
        drawn_.append((terms, rng.normal(size=rows) * 10.0 ** rng.integers(0, 6)))
    return drawn_


def test_nnls_is_as_good_as_the_best_set_of_terms():
    for terms, values in _problems(300):
        found = nnls(terms, values)
        assert (found >= 0).all()
        reached = float(((terms @ found - values) ** 2).sum())
        assert reached <= _by_subsets(terms, values) + 1e-8 * float(values @ values)


def test_nnls_agrees_with_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    for terms, values in _problems(100):
        expected = float(optimize.nnls(terms, values)[1])
        assert np.linalg.norm(terms @ nnls(terms, values) - values) == pytest.approx(expected, abs=1e-6)


PLANTED = np.array([40_000.0, 900.0, 0.0, 2.5])


def _steps(num: int, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    requests = rng.choice([1, 2, 4, 8, 16], num).astype(float)
    context = rng.choice([64, 256, 1024], num) + rng.integers(0, 20, num)
    seen = requests * context
    terms = np.stack([np.ones(num), requests, rng.uniform(0, 1, num) * 100, seen], axis=1)
    return terms, {"num_requests": requests, "num_seen": seen}


def test_planted_constants_are_found_without_noise():
    terms, sizes = _steps(500)
    found = fit(terms, terms @ PLANTED, sizes)
    assert found.constants == pytest.approx(PLANTED, rel=1e-6, abs=1e-3)
    assert found.error(100) < 1e-9
    assert found.ratios == pytest.approx([1.0] * 21, abs=1e-6)


def test_the_mean_of_noisy_steps_is_found_and_hiccups_leave_no_trace():
    terms, sizes = _steps(20_000)
    rng = np.random.default_rng(1)
    # Lognormal of mean 1: an ordinary step is a little faster than the mean.
    noise = rng.lognormal(-(0.1**2) / 2, 0.1, len(terms))
    noise[rng.integers(0, len(noise), 60)] *= 40
    found = fit(terms, terms @ PLANTED * noise, sizes)
    for constant, planted in zip(found.constants, PLANTED, strict=True):
        assert constant == pytest.approx(planted, rel=0.03, abs=30)
    assert found.error(90) < 0.02
    assert found.num_trimmed > 60
    draws = [quantile(found.ratios, u) for u in np.linspace(0, 1, 20_001)]
    assert np.mean(draws) == pytest.approx(1.0, abs=1e-3)
    assert np.quantile(draws, 0.9) == pytest.approx(np.exp(0.1 * 1.2816), rel=0.02)


def test_a_place_with_many_samples_does_not_outvote_the_others():
    """One place has 10,000 samples that no line through the others meets."""
    tokens = np.concatenate([np.full(10_000, 1.0), np.repeat([64.0, 256.0, 1024.0], 10)])
    terms = np.stack([np.ones(10_030), tokens], axis=1)
    ns = terms @ np.array([1000.0, 100.0])
    ns[:10_000] *= 1.5
    found = fit(terms, ns, {"num_tokens": tokens})
    by_size = {place.sizes[0]: place.error for place in found.places}
    assert abs(by_size[1024.0]) < 0.15
    told = found.residuals()
    assert (told.num_steps, told.worst_at) == (10_030, "64 tokens")
    assert told.worst == found.worst.error == pytest.approx(by_size[64.0])
    assert told.p50 <= told.p90 <= abs(told.worst)


def test_a_place_with_few_samples_is_fitted_but_does_not_judge():
    tokens = np.concatenate([np.repeat([1.0, 16.0, 256.0], 30), [4096.0]])
    terms = np.stack([np.ones(len(tokens)), tokens], axis=1)
    ns = terms @ np.array([1000.0, 100.0])
    ns[-1] *= 3
    found = fit(terms, ns, {"num_tokens": tokens})
    assert (len(found.places), len(found.judged)) == (4, 3)
    assert found.worst.sizes != (4096.0,)


def test_places_of_samples_are_those_of_points():
    sizes = np.array([0.0, 0.4, 1.0, 2.0, 3.0, 1000.0])
    assert [place_of((s,)) for s in sizes] == [tuple(p) for p in _places([sizes]).tolist()]


def test_means_that_are_low_by_chance_do_not_pull_a_fit_down():
    """Places of one sample each, a half at a fifth of the mean, the others as far above it."""
    sizes = np.arange(1.0, 201.0) * 1000
    terms = np.stack([np.ones(200), sizes], axis=1)
    noise = np.where(np.arange(200) % 2, 0.2, 1.8)
    found = fit(terms, (50_000 + 3 * sizes) * noise, {"num_tokens": sizes, "num_seen": sizes % 17_000})
    assert found.constants[0] + 100_000 * found.constants[1] == pytest.approx(350_000, rel=0.1)
