"""Products with packed weights: right beside float64, and the same whatever stands in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rayk.kernels.packed_product import is_packable, pack, packed_product
from rayk.kernels.packed_product.native import why_no_native
from tests.each import each
from tests.helpers import assert_matches, poison

pytestmark = pytest.mark.skipif(why_no_native() is not None, reason=str(why_no_native()))
DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((1, 2), (31, 6), (32, 64), (40, 1030), (97, 514))
"""Outputs and inputs: panels that are whole, partly filled; sums of one stretch, of several."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poison(monkeypatch):
        yield


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@each("num_rows", [1, 2, 3, 11, 12, 13, 23, 25, 96, 203])
@each("size", SIZES, ids=str)
@each("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(dtype: torch.dtype, has_bias: bool, size: tuple[int, int], num_rows: int) -> None:
    num_outputs, num_inputs = size
    x, weight = draw(num_rows, num_inputs, dtype=dtype), draw(*size, dtype=dtype, seed=1)
    bias = draw(num_outputs, dtype=dtype, seed=2) if has_bias else None
    found = packed_product(x, pack(weight), num_outputs, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_matches(found, exact, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_batch_nor_on_threads(dtype: torch.dtype) -> None:
    x, weight = draw(150, 1500, dtype=dtype), draw(100, 1500, dtype=dtype, seed=1)
    panels = pack(weight)
    torch.set_num_threads(1)
    whole = packed_product(x, panels, 100, None)
    for rows in (slice(0, 1), slice(3, 7), slice(10, 27), slice(95, 150)):
        assert torch.equal(packed_product(x[rows], panels, 100, None), whole[rows])
    torch.set_num_threads(2)
    assert torch.equal(packed_product(x, panels, 100, None), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_lie_in_a_wider_tensor(dtype: torch.dtype) -> None:
    wide, weight = draw(9, 200, dtype=dtype), draw(70, 64, dtype=dtype, seed=1)
    for x in (wide[:, 40:104], wide[::2, :64], wide.T[:64].T, wide[:, ::2][:, :64]):
        found = packed_product(x, pack(weight), 70, None)
        assert torch.equal(found, packed_product(x.contiguous(), pack(weight), 70, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_where_it_belongs(dtype: torch.dtype) -> None:
    x, weight = draw(3, 64, dtype=dtype), draw(40, 64, dtype=dtype, seed=1)
    x[1, 5], weight[7, 9] = torch.inf, torch.nan
    found = packed_product(x, pack(weight), 40, None)
    assert found.isnan().nonzero().tolist() == F.linear(x, weight).isnan().nonzero().tolist()
    assert found[:, 7].isnan().all()
    assert found[0].isfinite().sum() == found[2].isfinite().sum() == 39


def test_no_rows() -> None:
    assert packed_product(torch.empty(0, 64), pack(torch.zeros(40, 64)), 40, None).shape == (0, 40)


def test_what_is_not_packed() -> None:
    assert is_packable(torch.empty(63, 64))
    assert not is_packable(torch.empty(40, 64)), "a third of its panels would be empty"
    assert not is_packable(torch.empty(64, 64, dtype=torch.float16))
    assert not is_packable(torch.empty(64, 63, dtype=torch.bfloat16)), "inputs go in pairs"
