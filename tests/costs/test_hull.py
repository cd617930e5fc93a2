"""Tables hold near steps that were measured, and nowhere else."""

from __future__ import annotations

import pytest

from rayk.costs.features import StepFeatures, step_features
from rayk.costs.steps import hull_around
from rayk.types.errors import OutsideHull
from tests.costs.test_tables import batch


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


GRID = hull_around([decode(requests, context) for requests in (1, 4, 16) for context in (64, 256, 1024)])


@pytest.mark.parametrize("requests", [1, 2, 3, 8, 11, 16])
@pytest.mark.parametrize("context", [64, 128, 500, 700, 1024])
def test_a_grid_that_grows_by_four_has_no_holes(requests: int, context: int):
    assert GRID.why_outside(decode(requests, context)) is None


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (decode(17, 64), "num_requests 17 is outside of 0 to 16"),
        (decode(16, 1025), "num_pairs 16,400 is outside of 0 to 16,384"),
        (
            decode(1, 4096),
            "the nearest to 1 tokens, 4,096 pairs per token, 4,096 seen per request is about 1",
        ),
        (decode(16, 16), "16 pairs per token, 16 seen per request is about .* 64 pairs per token"),
    ],
)
def test_what_no_measured_step_is_near_is_refused(step: StepFeatures, why: str):
    with pytest.raises(OutsideHull, match=why):
        GRID.check(step, "an engine")


def test_a_hole_in_the_grid_is_outside():
    found = hull_around([decode(1, context) for context in (16, 32, 1024, 2048)])
    inside = [found.why_outside(decode(1, context)) is None for context in (20, 64, 128, 256, 512, 1500)]
    assert inside == [True, True, False, False, True, True]


def test_a_mixed_step_is_like_one_of_its_shape_whatever_the_number_of_its_requests():
    """Chunks of 64 and 128 tokens of one prompt were measured; here a prompt ends, and two others begin."""
    measured = [
        step_features(batch(*shares)) for shares in ([(64, 0)], [(128, 0)], [(128, 128)], [(1, 64)] * 4)
    ]
    mixed = step_features(batch((63, 0), (64, 0), (1, 16)))
    assert hull_around(measured).why_outside(mixed) is None
