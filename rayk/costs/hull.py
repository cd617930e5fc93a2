"""Say where a cost table holds: among steps like those that it was fitted to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rayk.costs.features import DecodeRun, StepFeatures
from rayk.types.errors import OutsideHull

AXES = ("num_requests", "num_tokens", "num_pairs", "num_seen")
SHAPE = ("tokens", "pairs per token", "seen per request")
"""What places are told apart by: sums alone would call one long request like many short ones."""
PARTS_OF_OCTAVE = 2
"""Sizes that round to the same half octave are of one place."""
REACH = 2
"""How far a step may be from a measured place on every axis, in half octaves: one octave, so that a grid
whose sizes grow by 4 has no holes."""

Place = tuple[int, ...]


def place_of(sizes: Iterable[float]) -> Place:
    """Round sizes to half octaves. 0 has the place below that of 1, and is in reach of it."""
    return tuple(round(PARTS_OF_OCTAVE * math.log2(s)) if s >= 1 else -1 for s in sizes)


def shape_of(features: StepFeatures) -> tuple[float, ...]:
    """Return a step's sizes in the order of SHAPE."""
    f = features
    return f.num_tokens, f.num_pairs / max(1, f.num_tokens), f.num_seen / max(1, f.num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hull:
    """Bounds features, ends included, and their shapes to places that were measured and what is near them.
    Without bounds a table holds everywhere, without places everywhere within the bounds."""

    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of AXES
    places: tuple[tuple[int, ...], ...] = ()  # in the order of SHAPE
    _is_near: dict[Place, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def why_outside(self, features: StepFeatures) -> str | None:
        """Name the first feature that lies outside, or the nearest place; None: the step lies within."""
        for axis, (least, most) in self.bounds.items():
            value = getattr(features, axis)
            if not least <= value <= most:
                return f"{axis} {value:,} is outside of {least:,} to {most:,}"
        if not self.places:
            return None
        place = place_of(shape_of(features))
        if self._reaches(place):
            return None
        nearest = min(self.places, key=lambda other: _distance(place, other))
        like = [2 ** (p / PARTS_OF_OCTAVE) if p >= 0 else 0.0 for p in nearest]
        return f"the nearest to {_in_words(shape_of(features))} is about {_in_words(like)}"

    def _reaches(self, place: Place) -> bool:
        """Tell whether a measured place is near."""
        if place not in self._is_near:
            self._is_near[place] = any(_distance(place, other) <= REACH for other in self.places)
        return self._is_near[place]

    def num_inside(self, run: DecodeRun) -> int:
        """Count the first of these steps that lie within."""
        num_steps = len(run.num_seen)
        if not self.bounds and not self.places:
            return num_steps
        # Sums grow from step to step, so what lies between two steps of one place is of it.
        ends = run.step(0), run.step(num_steps - 1)
        places = {place_of(shape_of(step)) for step in ends} if self.places else set()
        is_bounded = all(
            least <= getattr(step, axis) <= most
            for step in ends
            for axis, (least, most) in self.bounds.items()
        )
        if is_bounded and len(places) < 2 and all(map(self._reaches, places)):
            return num_steps
        outside = (i for i in range(num_steps) if self.why_outside(run.step(i)) is not None)
        return next(outside, num_steps)

    def check(self, features: StepFeatures, where: str) -> None:
        """Raises OutsideHull for a step that lies outside."""
        if (why := self.why_outside(features)) is not None:
            raise OutsideHull(
                problem=f"no step like this was measured: {why}",
                where=where,
                mend="measure such steps (`rayk costs`), or --extrapolate",
            )


def _distance(place: Place, other: Place) -> int:
    return max(abs(a - b) for a, b in zip(place, other, strict=True))


def _in_words(sizes: Iterable[float]) -> str:
    return ", ".join(f"{size:,.0f} {name}" for name, size in zip(SHAPE, sizes, strict=True))
