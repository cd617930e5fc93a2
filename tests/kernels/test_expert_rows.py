"""Rows in the order of experts, and back, against loops over tokens in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rayk.kernels.expert_rows import combine_rows, gather_rows
from tests.each import each
from tests.helpers import assert_matches, poison
from tests.markers import gpu, interpreted

IMPLS = ("reference", pytest.param("triton", marks=interpreted))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poison(monkeypatch):
        yield


def drawn(num_tokens: int, num_copies: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, an order of their copies, and shares."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 2 * size, generator=generator).to(dtype)[:, :size]
    order = torch.randperm(num_tokens * num_copies, generator=generator)
    return x, order, torch.rand(num_tokens, num_copies, generator=generator)


@each("num_copies", [1, 3, 8])
@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_rows_go_to_their_places(impl: str, dtype: torch.dtype, num_copies: int) -> None:
    x, order, _ = drawn(5, num_copies, 40, dtype)
    rows, places = gather_rows(x, order, num_copies, impl=impl)
    for i, copy in enumerate(order.tolist()):
        assert torch.equal(rows[i], x[copy // num_copies])
        assert places[copy] == i


@each("wide", [False, True])
@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_inputs_are_weighed_and_rounded(impl: str, dtype: torch.dtype, wide: bool) -> None:
    x, order, shares = drawn(6, 2, 1100, dtype)
    shares = shares if wide else shares.to(dtype)
    rows, _ = gather_rows(x, order, 2, shares, impl=impl)
    exact = (x.double().repeat_interleave(2, 0) * shares.double().view(-1, 1))[order]
    eager = (x.repeat_interleave(2, 0) * shares.view(-1, 1)).to(dtype)[order]
    assert_matches(rows, exact, eager)


@each("wide", [None, False, True])
@each("num_own", [0, 5, 24])
@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_copies_are_added_up(impl: str, dtype: torch.dtype, num_own: int, wide: bool | None) -> None:
    """By shares in float32, in the rows' dtype, or none. Rows beyond the rank's own are not read: they hold
    NaN."""
    _, order, shares = drawn(8, 3, 70, dtype)
    rows = torch.randn(24, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = None if wide is None else shares if wide else shares.to(dtype)
    places = order.argsort()
    exact = torch.zeros(8, 70, dtype=torch.float64)
    for i in range(num_own):
        token, copy = divmod(int(order[i]), 3)
        exact[token] += rows[i].double() * (1.0 if weights is None else weights[token, copy].double())
    eager = exact.to(dtype)
    rows[num_own:] = float("nan")
    counted = None if num_own == 24 else torch.tensor([num_own], dtype=torch.int32)
    found = combine_rows(rows, places, weights, 3, num_rows=counted, impl=impl)
    assert found.dtype == dtype
    assert_matches(found, exact, eager)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens(impl: str) -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    rows, places = gather_rows(torch.empty(0, 8), nobody, 2, impl=impl)
    assert rows.shape == (0, 8)
    assert combine_rows(rows, places, torch.empty(0, 2), 2, impl=impl).shape == (0, 8)


@gpu
@each("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """At sizes of real models."""
    x, order, shares = (t.cuda() for t in drawn(300, 8, 7168, dtype))
    rows, places = gather_rows(x, order, 8, impl="triton")
    assert torch.equal(rows, x[order // 8])
    assert torch.equal(places, order.argsort())
    found = combine_rows(rows, places, shares, 8, impl="triton")
    eager = (x.float() * shares.sum(1, keepdim=True)).to(dtype)
    assert_matches(found, x.double() * shares.double().sum(1, keepdim=True), eager)
