"""Say where a cost table holds: among steps like those that it was fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayk.costs.features import StepFeatures
from rayk.types.errors import OutsideHull

AXES = ("num_requests", "num_tokens", "num_pairs", "num_seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hull:
    """Bounds features, ends included. Without bounds a table holds everywhere."""

    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of AXES

    def why_outside(self, features: StepFeatures) -> str | None:
        """Name the first feature that lies outside; None: all lie within."""
        for axis, (least, most) in self.bounds.items():
            value = getattr(features, axis)
            if not least <= value <= most:
                return f"{axis} {value:,} is outside of {least:,} to {most:,}"
        return None

    def check(self, features: StepFeatures, where: str) -> None:
        """Raises OutsideHull for a step that lies outside."""
        if (why := self.why_outside(features)) is not None:
            raise OutsideHull(
                problem=f"no step like this was measured: {why}",
                where=where,
                mend="measure such steps (`rayk costs`), or --extrapolate",
            )
