"""The best token of each row: torch's argmax, and no token where a logit is not finite."""

from __future__ import annotations

import pytest
import torch

from rayk.kernels.best_tokens import NO_TOKEN, best_tokens
from rayk.kernels.best_tokens.native import is_native

pytestmark = pytest.mark.skipif(not is_native(torch.zeros(1, 1)), reason="no compiler")
SIZES = (1, 5, 16, 17, 4096, 4099)


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("size", SIZES)
def test_the_first_of_equal_ones_is_chosen(size: int, impl: str) -> None:
    draw = torch.Generator().manual_seed(size)
    wide = torch.randn(40, size + 3, generator=draw).bfloat16().float()  # bfloat16: many are equal
    wide[1], wide[2], wide[3] = -5.0, -3e38, 3e38
    logits = wide[::2, :size]
    expected = [max(range(size), key=lambda i, r=row: (r[i], -i)) for row in logits.tolist()]
    assert best_tokens(logits, impl=impl).tolist() == expected


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_that_is_not_finite_has_no_token(size: int, value: float, impl: str) -> None:
    places = sorted({0, size // 2, size - 1})
    logits = torch.zeros(2 * len(places), size)
    logits[:, -1] = 3e38
    for row, place in enumerate(places):
        logits[2 * row, place] = value
    found = best_tokens(logits, impl=impl)
    assert found.tolist() == [NO_TOKEN, size - 1] * len(places)


def test_no_rows() -> None:
    assert best_tokens(torch.empty(0, 8)).shape == (0,)
