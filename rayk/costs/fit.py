"""Fit non-negative constants to what was measured: ns = constants . terms.

Samples are gathered at places (see hull.place_of): the fit is of a place's mean, errors are relative, a
place that was measured a thousand times counts little more than one measured often enough, and the extreme
samples of a place are left out, so that a hiccup of the machine does not set its mean. N is the number of
samples, K of terms, G of places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rayk.costs.hull import PARTS_OF_OCTAVE
from rayk.costs.table import Residuals

Floats = NDArray[np.float64]

TRIMMED = 0.01
"""Share of a place's samples left out at either end."""
MIN_TRIMMED = 20  # fewer samples of a place are all kept
ENOUGH = 64
"""Samples of a place over which more add nothing to its weight."""
MIN_JUDGED = 4
"""The mean of fewer samples says more of the machine's noise than of the fit."""
QUANTILES = np.linspace(0.0, 1.0, 21)
_WEIGHTED = 4  # fits of means, each weighted by the one before it
_LEAST = 0.1  # of a mean that is measured: less of it is not believed of a fit in between
_ROUNDS = 2  # of trimming, the second by the better fit
_NO_GAIN = 1e-10  # relative to the gradients' size


def nnls(terms: Floats, values: Floats) -> Floats:
    """Solve min |terms x - values| with x >= 0 (terms [N, K], values [N]).

    Active sets as in C. Lawson and R. Hanson, Solving Least Squares Problems (1974), chapter 23; by the QR
    factor of (terms, values), so that a round costs K^3 whatever N is, and with columns scaled alike.
    """
    num_terms = terms.shape[1]
    scale = np.sqrt((terms**2).sum(axis=0))
    scale[scale == 0] = 1.0
    # Its type hints know one answer, that of mode "reduced".
    factor = cast(Floats, np.linalg.qr(np.column_stack([terms / scale, values]), mode="r"))
    matrix, target = factor[:, :num_terms], factor[:, num_terms]
    found, free = np.zeros(num_terms), np.zeros(num_terms, dtype=bool)
    tolerance = _NO_GAIN * max(1.0, float(np.abs(target).max(initial=0.0)))
    for _ in range(3 * num_terms + 10):
        gain = np.where(free, -np.inf, matrix.T @ (target - matrix @ found))
        if free.all() or gain.max() <= tolerance:
            break
        free[gain.argmax()] = True
        found = _with_free(matrix, target, found, free)
    return cast(Floats, found / scale)


def _with_free(matrix: Floats, target: Floats, found: Floats, free: NDArray[np.bool_]) -> Floats:
    """Solve for the free constants; any that would turn negative is fixed at 0 (in `free`), the others move
    as far as that allows."""
    while True:
        step = np.zeros_like(found)
        step[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        negative = np.flatnonzero(free & (step <= 0))
        if not len(negative):
            return step
        shares = found[negative] / (found[negative] - step[negative])
        bound = int(shares.argmin())
        found = np.maximum(found + shares[bound] * (step - found), 0.0)
        found[negative[bound]] = 0.0  # but for rounding it is
        free &= found > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceError:
    """How far off a fit is at one place."""

    sizes: tuple[float, ...]
    """The mean size of its samples on each axis."""
    num_samples: int
    mean_ns: float
    error: float
    """Fitted over measured mean, minus 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    constants: tuple[float, ...]
    """They are in nanoseconds per unit of each term."""
    axes: tuple[str, ...]
    places: tuple[PlaceError, ...]
    num_samples: int
    num_trimmed: int
    ratios: tuple[float, ...]
    """Quantiles (at `QUANTILES`) of measured over fitted time, scaled so that times drawn by them have the
    fitted mean."""

    @property
    def judged(self) -> tuple[PlaceError, ...]:
        """The places that say how far off the fit is: those with enough samples, all if none has."""
        return tuple(p for p in self.places if p.num_samples >= MIN_JUDGED) or self.places

    def error(self, percent: float) -> float:
        """Return a percentile of the places' absolute errors, each place once."""
        return float(np.percentile([abs(place.error) for place in self.judged], percent))

    @property
    def worst(self) -> PlaceError:
        return max(self.judged, key=lambda place: abs(place.error))

    def residuals(self) -> Residuals:
        """Sum up the errors for a table."""
        worst = self.worst
        sizes = zip(self.axes, worst.sizes, strict=True)
        return Residuals(
            num_steps=self.num_samples,
            p50=self.error(50),
            p90=self.error(90),
            worst=worst.error,
            worst_at=", ".join(f"{size:,.0f} {axis.removeprefix('num_')}" for axis, size in sizes),
        )


def fit(terms: Floats, ns: Floats, sizes: Mapping[str, Floats]) -> Fitted:
    """Fit constants to samples: terms [N, K], ns [N] > 0, sizes axis -> [N], which say what place a sample is
    of. Needs a sample."""
    assert len(ns), "nothing to fit"
    _, of_sample = np.unique(_places(list(sizes.values())), axis=0, return_inverse=True)
    of_sample = of_sample.reshape(-1)
    kept = np.ones(len(ns), dtype=bool)
    constants = np.zeros(terms.shape[1])
    for round_ in range(_ROUNDS + 1):
        constants = _fit_means(terms[kept], ns[kept], of_sample[kept])
        if round_ < _ROUNDS:
            kept = _typical(ns / np.maximum(terms @ constants, 1.0), of_sample)
    fitted = np.maximum(terms @ constants, 1e-9)
    return Fitted(
        constants=tuple(constants.tolist()),
        axes=tuple(sizes),
        places=tuple(_errors(fitted[kept], ns[kept], of_sample[kept], [s[kept] for s in sizes.values()])),
        num_samples=len(ns),
        num_trimmed=int((~kept).sum()),
        ratios=_spread(ns[kept] / fitted[kept]),
    )


def _places(columns: Sequence[Floats]) -> NDArray[np.int64]:
    """Return the place of each sample [N, axes], as `hull.place_of` does for one."""
    sizes = np.stack(columns, axis=1)
    rounded = np.rint(PARTS_OF_OCTAVE * np.log2(np.maximum(sizes, 1.0)))
    return np.where(sizes >= 1, rounded, -1).astype(np.int64)


def _means(values: Floats, of_sample: NDArray[np.intp], counts: Floats) -> Floats:
    """Average over each place: [N] -> [G]; places without samples get 0."""
    return np.bincount(of_sample, values, minlength=len(counts)) / np.maximum(counts, 1)


def _fit_means(terms: Floats, ns: Floats, of_sample: NDArray[np.intp]) -> Floats:
    """Fit the places' means, errors relative to what is fitted: relative to the measured, a mean that is low
    by chance would count for more than one that is high."""
    counts = np.bincount(of_sample).astype(float)
    is_there = counts > 0
    means = _means(ns, of_sample, counts)[is_there]
    matrix = np.stack([_means(column, of_sample, counts)[is_there] for column in terms.T], axis=1)
    sizes = means
    for _ in range(_WEIGHTED):
        weights = np.sqrt(np.minimum(counts[is_there], ENOUGH)) / sizes
        found = nnls(matrix * weights[:, None], means * weights)
        sizes = np.maximum(matrix @ found, _LEAST * means)
    return found


def _typical(ratios: Floats, of_sample: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Tell which samples lie between the trimmed quantiles of their place."""
    order = np.lexsort((ratios, of_sample))
    counts = np.bincount(of_sample)
    num_cut = np.where(counts >= MIN_TRIMMED, np.ceil(TRIMMED * counts), 0).astype(np.int64)
    rank = np.arange(len(ratios)) - (np.cumsum(counts) - counts)[of_sample[order]]
    here = of_sample[order]
    kept = np.empty(len(ratios), dtype=bool)
    kept[order] = (rank >= num_cut[here]) & (rank < (counts - num_cut)[here])
    return kept


def _errors(
    fitted: Floats, ns: Floats, of_sample: NDArray[np.intp], sizes: Sequence[Floats]
) -> list[PlaceError]:
    counts = np.bincount(of_sample).astype(float)
    measured, expected = _means(ns, of_sample, counts), _means(fitted, of_sample, counts)
    centres = [_means(size, of_sample, counts) for size in sizes]
    return [
        PlaceError(
            sizes=tuple(round(float(centre[g]), 1) for centre in centres),
            num_samples=int(counts[g]),
            mean_ns=float(measured[g]),
            error=float(expected[g] / measured[g] - 1),
        )
        for g in np.flatnonzero(counts)
    ]


def _spread(ratios: Floats) -> tuple[float, ...]:
    """Return quantiles whose interpolation has the mean 1."""
    found = np.quantile(ratios, QUANTILES)
    mean = np.trapezoid(found, QUANTILES)
    return tuple((found / mean).tolist()) if mean > 0 else (1.0,) * len(QUANTILES)
