"""Bound how far a right implementation may be off: as far as plain eager PyTorch in the same dtype, and some
more.

Errors are measured against float32 arithmetic on the weights as the dtype rounds them (exact, below). Two
implementations that round in other places err by like amounts, but not at the same values:

- the worst of many errors of one implementation was 0.4 to 1.6 times the worst of the other's over all
  families, dtypes and TP sizes: WORST_FACTOR allows twice (and WORST_SIGMAS times eager's RMS, should its few
  values have come out small by chance);
- RMS errors of 24 values were 0.6 to 1.4 times the other's, of hundreds 0.85 to 1.15 times: allowed are
  RMS_FACTOR + RMS_SPREAD / sqrt(number of values) times.

Both are needed: one wrong token shows in the worst error, a small error everywhere in the RMS.

Where a router chooses experts, rounding now and then flips a choice, and that token is off by any amount
(FAMILIES: single logits by up to 12), and so to a lesser degree are those that attend to it: at other tokens
in each implementation, in up to half of a prompt. Only the median and the lower quartile of the errors are
judged there; allowed are so many times eager's, plus ROUTED_SPREAD / sqrt(number of values):

- ROUTED_TOKENS, where all tokens of a cell are judged at once (right engines, 306 cells: 1.4 and 1.2);
- ROUTED_ROWS, where each prompt, layer and head is: one flip near its start moves most of them (right
  engines, 466 prompts: 3.9 and 1.9).

In float16 few routes flip, but one near the start of a prompt is felt in all the rest of it, and eager may
have met none: its own noise counts together with bfloat16's, where flips are sure to be met (References).

What it cannot see where experts are routed: an error in less than half of the tokens, and one no larger than
some three times rounding (of a model of random weights, the sinks that only the last layer lost; in bfloat16
now and then those of another layer, too). Recurrent states behind experts are not judged at all there: each
sums over all tokens, flipped ones included. float32 proves routed models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

WORST_FACTOR = 2.0
WORST_SIGMAS = 4.0
RMS_FACTOR = 1.5
RMS_SPREAD = 3.0
BULK_QUANTILE = 0.9
ROUTED_TOKENS = {"median": 3.0, "lower quartile": 2.0}
ROUTED_ROWS = {"median": 5.0, "lower quartile": 2.5}
ROUTED_SPREAD = 8.0
SHARES = {"median": 0.5, "lower quartile": 0.25}
PRIOR_WEIGHT = 8  # the further values of `measure` weigh as much as so many of eager's own
PRIOR_WEIGHT_ROUTED = 64
"""Weight where experts are routed, against as many values as are judged at once: a flip is met in all values
that follow it or in none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantile:
    """One of eager's errors, where experts are routed."""

    name: str  # median or lower quartile
    factor: float  # how many times that is allowed, of very many errors
    own: float
    further: float

    def expected(self, num_values: int) -> float:
        """Estimate this quantile of so many of eager's errors."""
        own = num_values / (num_values + PRIOR_WEIGHT_ROUTED)
        return own * self.own + (1 - own) * self.further

    def limit(self, num_values: int) -> float:
        return (self.factor + ROUTED_SPREAD / math.sqrt(max(1, num_values))) * self.expected(num_values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Bounds the errors of a right implementation. Made by `measure`."""

    floor: float  # errors up to here are always allowed
    worst: float  # each error; of a routed model nine in ten
    typical: float  # RMS of eager's errors
    quantiles: tuple[Quantile, ...] = ()  # where experts are routed only these are judged, the median first

    def limit(self, num_values: int) -> float:
        """Limit the RMS of so many errors, or their median where experts are routed."""
        if self.quantiles:
            return max(self.floor, self.quantiles[0].limit(num_values))
        root = math.sqrt(max(1, num_values))
        return max(self.floor, (RMS_FACTOR + RMS_SPREAD / root) * self.typical)

    def times(self, factor: float) -> Bound:
        """Scale the bound for errors that add up from so many."""
        return replace(
            self,
            floor=factor * self.floor,
            worst=factor * self.worst,
            typical=factor * self.typical,
            quantiles=tuple(
                replace(q, own=factor * q.own, further=factor * q.further) for q in self.quantiles
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Excess:
    """A statistic of many errors that is too large."""

    name: str  # RMS, median or lower quartile
    found: float
    limit: float


def measure(
    noise: torch.Tensor,
    *,
    floor: float,
    routed: Mapping[str, float] | None = None,
    further: torch.Tensor | None = None,
) -> Bound:
    """Return the bound from eager's absolute errors, [any shape].

    `further`: its errors of like values that are not compared, or in a rougher dtype; they count where
    `noise` is short. All-zero noise (eager is the exact run itself) leaves the floor. Infinite errors, where
    eager overflows, bound nothing: they do not count. `routed`: ROUTED_TOKENS or ROUTED_ROWS where experts
    are routed.
    """
    noise = _finite(noise)
    further = noise if further is None or not further.numel() else _finite(further)
    own = noise.numel() / (noise.numel() + PRIOR_WEIGHT)
    typical = math.sqrt(own * rms(noise) ** 2 + (1 - own) * rms(further) ** 2)
    if typical == 0:
        return Bound(floor=floor, worst=floor, typical=0.0)
    most = _quantile(noise, BULK_QUANTILE if routed else 1.0)
    return Bound(
        floor=floor,
        worst=max(floor, WORST_FACTOR * most, WORST_SIGMAS * typical),
        typical=typical,
        quantiles=tuple(
            Quantile(
                name=name,
                factor=factor,
                own=_quantile(noise, SHARES[name]),
                further=_quantile(further, SHARES[name]),
            )
            for name, factor in (routed or {}).items()
        ),
    )


def excess(errors: torch.Tensor, bound: Bound) -> Excess | None:
    """Find the first statistic of all these absolute errors, none of them NaN, that breaks the bound."""
    if errors.numel() == 0:
        return None
    errors, count = errors.double().flatten(), errors.numel()
    found = [Excess(name="RMS", found=rms(errors), limit=bound.limit(count))]
    if bound.quantiles:
        found = [
            Excess(
                name=q.name, found=_quantile(errors, SHARES[q.name]), limit=max(bound.floor, q.limit(count))
            )
            for q in bound.quantiles
        ]
    return next((e for e in found if e.found > e.limit), None)


def broken_statistic(errors: torch.Tensor, bound: Bound) -> Excess | None:
    """Find what all these errors break together; None where a single one is beyond `worst`, or nothing is
    broken."""
    if not bound.quantiles and bool((errors > bound.worst).any()):
        return None
    return excess(errors, bound)


def broken(errors: torch.Tensor, bound: Bound) -> torch.Tensor:
    """Mark, as bool of their shape, absolute errors that break the bound: those beyond `worst`, else all
    beyond the limit of their RMS if that is broken. Where experts are routed: all beyond the limit of their
    median if that is broken, else of their lower quartile. NaN is beyond everything."""
    errors = torch.where(errors.isnan(), torch.inf, errors.double())
    if not bound.quantiles and bool((errors > bound.worst).any()):
        return errors > bound.worst
    over = excess(errors, bound)
    return torch.zeros_like(errors, dtype=torch.bool) if over is None else errors > over.limit


def _finite(errors: torch.Tensor) -> torch.Tensor:
    errors = errors.double().flatten()
    return errors[errors.isfinite()]


def rms(values: torch.Tensor) -> float:
    """Take the root of the mean square, 0 of nothing."""
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def _quantile(values: torch.Tensor, share: float) -> float:
    """0 of nothing. (torch.quantile takes no more than 2^24 values.)"""
    rank = math.ceil(share * values.numel())
    return float(values.kthvalue(rank).values) if rank else 0.0
