"""Products of groups of rows against products of one group each in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rayk.kernels.grouped_matmul import grouped_matmul
from tests.each import each
from tests.helpers import assert_matches
from tests.markers import gpu, interpreted

IMPLS = ("reference", "torch", pytest.param("triton", marks=interpreted))
SIZES = {
    "even": (8, 8, 8),
    "empty ones at both ends": (0, 5, 0, 0, 30, 1, 0),
    "one": (7,),
    "nobody": (0, 0),
    "many": (1, 0, 2) * 20,
}
NUM_LEFT_OVER = 3
"""Rows that belong to no group, as those of other ranks' experts."""


def drawn(
    sizes: Sequence[int], num_in: int, num_out: int, dtype: torch.dtype, *, transposed: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(len(sizes))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights = draw(len(sizes), num_out, num_in).mT if transposed else draw(len(sizes), num_in, num_out)
    biases = draw(len(sizes), num_out) if biased else None
    ends = torch.tensor(sizes).cumsum(0).int()
    return draw(sum(sizes) + NUM_LEFT_OVER, num_in), weights, ends, biases


def check(arguments: tuple[Tensor, Tensor, Tensor, Tensor | None], device: str, **how: Any) -> None:
    x, weights, ends, biases = arguments
    groups = torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)

    def whole(dtype: torch.dtype) -> Tensor:
        rows = x[: len(groups), None].to(dtype) @ weights.to(dtype)[groups]
        return rows[:, 0] if biases is None else rows[:, 0] + biases[groups].to(dtype)

    moved = [None if t is None else t.to(device) for t in arguments]
    if biases is not None:
        # The rows' own strides are taken too.
        wide = torch.cat([moved[0], moved[0]], -1)
        moved[0] = wide[:, : x.shape[1]] if how["impl"] != "torch" else moved[0]
    found = grouped_matmul(*moved, **how)[: len(groups)].cpu()
    assert_matches(found, whole(torch.float64), whole(x.dtype))


@each("transposed", [False, True])
@each("biased", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("impl", IMPLS)
def test_each_row_meets_its_groups_matrix(
    impl: str, sizes: Sequence[int], biased: bool, transposed: bool
) -> None:
    """Also at inner and outer sizes that no tile divides."""
    shape = (40, 72)
    check(drawn(sizes, *shape, torch.float32, transposed=transposed, biased=biased), "cpu", impl=impl)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_in_the_interpreter(dtype: torch.dtype) -> None:
    check(drawn((20, 0, 3), 70, 130, dtype, transposed=True, biased=True), "cpu", impl="triton")


@gpu
@each("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@each("impl", ["triton", None])
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_on_a_gpu(rows: int, impl: str | None, dtype: torch.dtype) -> None:
    """128 experts, of which few, most and all have rows; also as chosen by itself."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(0, 128, (8 * rows,), generator=generator)
    sizes = torch.bincount(chosen, minlength=128).tolist()
    check(drawn(sizes, 512, 768, dtype, transposed=True, biased=False), "cuda", impl=impl)
