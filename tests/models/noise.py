"""Comparing few numbers with transformers': one eager run would show too little of its noise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from tests.helpers import assert_matches
from tests.models.tiny import Checkpoint


def assert_as_transformers(
    checkpoint: Checkpoint, mine: torch.Tensor, theirs: Callable[[Any], torch.Tensor], what: str = "result"
) -> None:
    """`mine`, float32, against theirs(model): right as far as the worse of two eager results is, elementwise.

    The second one is of the model with every weight off by up to half a rounding, which is what another
    order of a product's sums amounts to.
    """
    exact, eager = theirs(checkpoint.exact), theirs(checkpoint.model)
    other = theirs(_rounded_otherwise(checkpoint.model))
    is_worse = (other.double() - exact).abs() > (eager.double() - exact).abs()
    assert_matches(mine, exact, torch.where(is_worse, other, eager), what=what)


def _rounded_otherwise(model: Any) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.mul_(1 + torch.finfo(torch.float32).eps * noise)
    return other
