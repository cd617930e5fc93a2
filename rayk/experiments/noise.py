"""How far a right implementation may be off: as far as plain eager PyTorch in the same dtype, and some more.

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
in each implementation, in up to half of a prompt. Only the median of the errors is judged there. It was 0.3
to 2 times eager's; allowed are MEDIAN_FACTOR times. In float16 few routes flip, but where few tokens are
compared one of them is enough: there counts bfloat16's median (see References). In bfloat16 this is a smoke
test: of a model of random weights it misses the biases of all experts. float32 proves routed models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

WORST_FACTOR = 2.0
WORST_SIGMAS = 4.0
RMS_FACTOR = 1.5
RMS_SPREAD = 3.0
BULK_QUANTILE = 0.9
MEDIAN_FACTOR = 4.0
MEDIAN_SPREAD = 8.0
PRIOR_WEIGHT = 8
"""How many of eager's own values the further ones of `measure` together weigh as much as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What the errors of a right implementation keep. Made by `measure`."""

    floor: float
    """Errors up to here are always allowed."""
    worst: float
    """Each error; of a routed model nine in ten."""
    typical: float
    """RMS of eager's errors."""
    median: float | None = None
    """Of eager's errors, where experts are routed: the only thing that is judged there."""

    def limit(self, num_values: int) -> float:
        """Largest RMS of so many errors; their largest median where experts are routed."""
        root = math.sqrt(max(1, num_values))
        if self.median is not None:
            return max(self.floor, (MEDIAN_FACTOR + MEDIAN_SPREAD / root) * self.median)
        return max(self.floor, (RMS_FACTOR + RMS_SPREAD / root) * self.typical)

    def times(self, factor: float) -> Bound:
        """The bound of errors that add up from so many."""
        median = None if self.median is None else factor * self.median
        return replace(
            self,
            floor=factor * self.floor,
            worst=factor * self.worst,
            typical=factor * self.typical,
            median=median,
        )


def measure(
    noise: torch.Tensor, *, floor: float, routed: bool = False, further: torch.Tensor | None = None
) -> Bound:
    """The bound from eager's absolute errors, [any shape].

    `further`: its errors of like values that are not compared; they count where `noise` is short.
    All-zero noise (eager is the exact run itself) leaves the floor. `routed`: see above.
    """
    noise = noise.double().flatten()
    further = noise if further is None or not further.numel() else further.double().flatten()
    own = noise.numel() / (noise.numel() + PRIOR_WEIGHT)
    typical = math.sqrt(own * rms(noise) ** 2 + (1 - own) * rms(further) ** 2)
    if typical == 0:
        return Bound(floor=floor, worst=floor, typical=0.0)
    most = _quantile(noise, BULK_QUANTILE if routed else 1.0)
    return Bound(
        floor=floor,
        worst=max(floor, WORST_FACTOR * most, WORST_SIGMAS * typical),
        typical=typical,
        median=own * _quantile(noise, 0.5) + (1 - own) * _quantile(further, 0.5) if routed else None,
    )


def broken(errors: torch.Tensor, bound: Bound) -> torch.Tensor:
    """Which absolute errors break the bound, bool of their shape.

    Those beyond `worst`; if there are none, all beyond the limit of their RMS if that is. Where experts are
    routed: all beyond the limit of their median if that is. NaN is beyond everything.
    """
    errors = torch.where(errors.isnan(), torch.inf, errors.double())
    if errors.numel() == 0:
        return errors > 0
    limit = bound.limit(errors.numel())
    if bound.median is not None:
        is_broken = _quantile(errors.flatten(), 0.5) > limit
    elif bool((errors > bound.worst).any()):
        return errors > bound.worst
    else:
        is_broken = rms(errors) > limit
    return (errors > limit) if is_broken else torch.zeros_like(errors, dtype=torch.bool)


def rms(values: torch.Tensor) -> float:
    """Root of the mean square, 0 of nothing."""
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def _quantile(values: torch.Tensor, share: float) -> float:
    """0 of nothing. (torch.quantile takes no more than 2^24 values.)"""
    rank = math.ceil(share * values.numel())
    return float(values.kthvalue(rank).values) if rank else 0.0
