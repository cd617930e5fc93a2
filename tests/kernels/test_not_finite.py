"""Digests tell whether any value that they are of is NaN or infinite, as torch does."""

from __future__ import annotations

import itertools

import pytest
import torch

from rayk.kernels.digest import DigestedView, DigestedViews, RowPlaces, digest_views, native_digest
from rayk.kernels.digest.reference import not_finite_bits
from tests.markers import gpu, one_per

NATIVE = pytest.param("native", marks=pytest.mark.skipif(native_digest() is None, reason="no compiler"))
BLOCKS, HEADS, SLOTS = 4, 2, 8
LIVE = 11
"""Rows of the request: all of block 2, the first three of block 1."""


def flag(cache: torch.Tensor, impl: str, num_k: int) -> int:
    """Of K and V of num_k and the other elements, of the live rows."""
    rows = torch.arange(LIVE)
    blocks = torch.tensor([2, 1])[rows // SLOTS]
    fields = ((0, 0, num_k), (1, num_k, cache.shape[3] - num_k))
    view = DigestedView(cache, 3, (5, 9), fields)
    words = digest_views(
        DigestedViews((view,), (0,)),
        [RowPlaces(*(t.numpy() for t in (blocks, rows % SLOTS, rows)), 0, 1)],
        rows_per_group=16,
        impl=impl,
    )
    assert len(words) == 2 * HEADS + 1
    return int(words[-1])


def check(impl: str, dtype: torch.dtype, num_k: int, device: str = "cpu") -> None:
    largest = torch.finfo(dtype).max
    bad = [float("nan")] if dtype == torch.float8_e4m3fn else [float("nan"), float("inf"), -float("inf")]
    for at, value in itertools.product(
        ((2, 1, 7, 0), (1, 0, 2, num_k - 1), (2, 0, 0, num_k), (1, 1, 2, -1)), bad
    ):
        # What is not live, and a head's neighbours in its block, may hold anything.
        cache = torch.full((BLOCKS, HEADS, SLOTS, 2 * num_k + 3), float("nan"))
        cache[2], cache[1, :, :3] = largest, -largest
        cache = cache.to(dtype).to(device)
        assert flag(cache, impl, num_k) == 0
        cache[at] = torch.tensor(value).to(dtype)
        assert flag(cache, impl, num_k) == 1, (at, value)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@one_per()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", ["reference", "triton", NATIVE])
def test_a_value_that_is_not_finite_is_found_in_live_rows_alone(impl: str, dtype: torch.dtype) -> None:
    for num_k in (16, 5):  # words of eight bytes, and narrower ones
        check(impl, dtype, num_k)


@pytest.mark.parametrize("impl", ["reference", "triton", NATIVE])
def test_bytes_are_all_finite(impl: str) -> None:
    assert flag(torch.full((BLOCKS, HEADS, SLOTS, 32), 0x7F, dtype=torch.uint8), impl, 16) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_every_code_is_judged_as_by_torch(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    codes = torch.arange(1 << 8 * size)
    finite = codes.to({1: torch.uint8, 2: torch.uint16}[size]).view(dtype).float().isfinite()
    for width, place in [(w, p) for w in (1, 2, 4) if w >= size for p in range(0, w, size)]:
        mask, step = not_finite_bits(dtype, width)
        found = (((codes << 8 * place) & mask) + step) & (mask + step) != 0
        assert torch.equal(found, ~finite)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_finds_the_same(dtype: torch.dtype) -> None:
    for num_k in (16, 5):
        check("triton", dtype, num_k, "cuda")
