"""Tables hold near steps that were measured, and nowhere else."""

from __future__ import annotations

import pytest

from rayk.costs.features import StepFeatures
from rayk.costs.hull import AXES, Hull, place_of
from rayk.types.errors import OutsideHull


def decode(requests: int, context: int) -> StepFeatures:
    seen = requests * context
    return StepFeatures(
        num_requests=requests,
        num_tokens=requests,
        num_logits=requests,
        num_prefills=0,
        num_pairs=seen,
        num_seen=seen,
    )


def hull(*steps: StepFeatures) -> Hull:
    sizes = [[getattr(step, axis) for axis in AXES] for step in steps]
    bounds = {axis: (1, max(values)) for axis, values in zip(AXES, zip(*sizes, strict=True), strict=True)}
    return Hull(bounds=bounds, places=tuple(map(place_of, sizes)))


GRID = hull(*(decode(requests, context) for requests in (1, 4, 16) for context in (64, 256, 1024)))


@pytest.mark.parametrize("requests", [1, 2, 3, 8, 11, 16])
@pytest.mark.parametrize("context", [64, 128, 500, 700, 1024])
def test_a_grid_that_grows_by_four_has_no_holes(requests: int, context: int):
    assert GRID.why_outside(decode(requests, context)) is None


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (decode(17, 64), "num_requests 17 is outside of 1 to 16"),
        (decode(16, 1025), "num_pairs 16,400 is outside of 1 to 16,384"),
        (decode(1, 4096), "the nearest to 1 requests, 1 tokens, 4,096 pairs, 4,096 seen is about"),
        (decode(16, 16), "nearest to 16 requests, 16 tokens, 256 pairs, 256 seen is about"),
    ],
)
def test_what_no_measured_step_is_near_is_refused(step: StepFeatures, why: str):
    with pytest.raises(OutsideHull, match=why):
        GRID.check(step, "an engine")


def test_a_hole_in_the_grid_is_outside():
    found = hull(*(decode(1, context) for context in (16, 32, 1024, 2048)))
    inside = [found.why_outside(decode(1, context)) is None for context in (20, 64, 128, 256, 512, 1500)]
    assert inside == [True, True, False, False, True, True]
