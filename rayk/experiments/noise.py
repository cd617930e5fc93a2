"""How far a right implementation may be off: as far as plain eager PyTorch in the same dtype, and some more.

Errors are measured against float32 arithmetic on the weights as the dtype rounds them (exact, below). Two
implementations that round in other places err by like amounts, but not at the same values:

- the worst of many errors of one implementation was 0.4 to 1.6 times the worst of the other's over all
  families, dtypes and TP sizes: WORST_FACTOR allows twice;
- RMS errors of 24 values were 0.6 to 1.4 times the other's, of hundreds 0.85 to 1.15 times: allowed are
  RMS_FACTOR + RMS_SPREAD / sqrt(number of values) times.

Both are needed: one wrong token shows in the worst error, a small error everywhere in the RMS.

Where a router chooses experts, rounding now and then flips a choice, and that token is off by any amount
(FAMILIES: single logits by up to 12), in each implementation at other tokens. There the bulk is judged:
the worst allowed is twice what 90 % of eager's errors stay below, errors beyond count as that much in the
RMS, and no more of them may lie beyond than eager has, plus three standard deviations of such a count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

WORST_FACTOR = 2.0
BULK_QUANTILE = 0.9
OUTLIER_DEVIATIONS = 3.0
RMS_FACTOR = 1.5
RMS_SPREAD = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What the errors of a right implementation keep. Made by `measure`."""

    floor: float
    """Errors up to here are always allowed."""
    worst: float
    """Each error, but for the outliers."""
    typical: float
    """RMS of eager's errors, those beyond `worst` counted as `worst`."""
    outlier_share: float | None = None
    """Share of eager's errors beyond `worst`; None: there may be no outliers."""

    def rms_limit(self, num_values: int) -> float:
        """Largest RMS of so many errors, those beyond `worst` counted as `worst`."""
        factor = RMS_FACTOR + RMS_SPREAD / math.sqrt(max(1, num_values))
        return max(self.floor, factor * self.typical)

    def num_outliers(self, num_values: int) -> int:
        """How many of so many errors may lie beyond `worst`."""
        if self.outlier_share is None:
            return 0
        expected = self.outlier_share * num_values
        return math.ceil(expected + OUTLIER_DEVIATIONS * math.sqrt(expected + 1))


def measure(noise: torch.Tensor, *, floor: float, routed: bool) -> Bound:
    """The bound from eager's absolute errors, [any shape].

    All-zero noise (eager is the exact run itself) leaves the floor. `routed`: see above.
    """
    noise = noise.double().flatten()
    worst = WORST_FACTOR * _quantile(noise, BULK_QUANTILE if routed else 1.0)
    if worst <= floor:
        return Bound(floor=floor, worst=floor, typical=0.0)
    return Bound(
        floor=floor,
        worst=worst,
        typical=rms(noise.clamp(max=worst)),
        outlier_share=float((noise > worst).double().mean()) if routed else None,
    )


def broken(errors: torch.Tensor, bound: Bound) -> torch.Tensor:
    """Which absolute errors break the bound, bool of their shape: those beyond `worst` if they are too many,
    those above the RMS limit if the RMS is, none if the bound is kept. NaN is beyond everything."""
    errors = torch.where(errors.isnan(), torch.inf, errors.double())
    beyond = errors > bound.worst
    if int(beyond.sum()) > bound.num_outliers(errors.numel()):
        return beyond
    limit = bound.rms_limit(errors.numel())
    if rms(errors.clamp(max=bound.worst)) > limit:
        return errors > limit
    return torch.zeros_like(beyond)


def rms(values: torch.Tensor) -> float:
    """Root of the mean square, 0 of nothing."""
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def _quantile(values: torch.Tensor, share: float) -> float:
    """0 of nothing. (torch.quantile takes no more than 2^24 values.)"""
    rank = math.ceil(share * values.numel())
    return float(values.kthvalue(rank).values) if rank else 0.0
