"""The tolerance rule accepts correct results and rejects planted bugs; poison reaches every path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_matches, poison_tensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NUM_QUERIES, NUM_HEADS, HEAD_SIZE, NUM_KEYS = 16, 8, 64, 96
SCALE = HEAD_SIZE**-0.5


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float = SCALE) -> Tensor:
    """Attention of every query to every key, [T, H, D] each, in the inputs' dtype."""
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * scale, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def inputs(dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(NUM_QUERIES, NUM_HEADS, HEAD_SIZE, generator=generator)
    k = torch.randn(NUM_KEYS, NUM_HEADS, HEAD_SIZE, generator=generator)
    v = torch.randn(NUM_KEYS, NUM_HEADS, HEAD_SIZE, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def float32_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.float(), k.float(), v.float()).to(q.dtype)


def blockwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A correct kernel of another summation order: online softmax over blocks of 16 keys."""
    qf, kf, vf = q.float(), k.float(), v.float()
    peak = torch.full((NUM_HEADS, NUM_QUERIES), -torch.inf)
    total = torch.zeros(NUM_HEADS, NUM_QUERIES)
    out = torch.zeros(NUM_HEADS, NUM_QUERIES, HEAD_SIZE)
    for start in range(0, NUM_KEYS, 16):
        scores = torch.einsum("qhd,khd->hqk", qf, kf[start : start + 16]) * SCALE
        new_peak = torch.maximum(peak, scores.amax(-1))
        weights = torch.exp(scores - new_peak[..., None])
        shrink = torch.exp(peak - new_peak)
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + torch.einsum("hqk,khd->hqd", weights, vf[start : start + 16])
        peak = new_peak
    return (out / total[..., None]).transpose(0, 1).to(q.dtype)


def last_token_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return float32_inside(q, k[:-1], v[:-1])


def one_head_wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = float32_inside(q, k, v)
    out[:, 3] = float32_inside(q, k.roll(1, dims=1), v.roll(1, dims=1))[:, 3]
    return out


def scale_off_by_1_percent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.float(), k.float(), v.float(), SCALE * 1.01).to(q.dtype)


def one_element_wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = float32_inside(q, k, v)
    out[5, 2, 7] = v[:, 2, 7].max()
    return out


def never_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = float32_inside(q, k, v)
    out[-1, -1, -1] = torch.nan
    return out


def check(kernel: Callable[..., Tensor], dtype: torch.dtype, seed: int, *, tight: bool) -> None:
    q, k, v = inputs(dtype, seed)
    exact = attend(q.double(), k.double(), v.double())
    assert_matches(kernel(q, k, v), exact, attend(q, k, v), tight=tight, what="attention")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [float32_inside, blockwise])
def test_accepts_correct_kernels(kernel: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for seed in range(30):
        check(kernel, dtype, seed, tight=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accepts_eager_itself_when_not_tight(dtype: torch.dtype) -> None:
    for seed in range(30):
        check(attend, dtype, seed, tight=False)


@pytest.mark.parametrize("inside", [torch.float16, torch.bfloat16], ids=str)
def test_rejects_a_float32_kernel_that_computes_in_less(inside: torch.dtype) -> None:
    def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.to(inside), k.to(inside), v.to(inside)).float()

    for seed in range(30):
        with pytest.raises(AssertionError, match="attention: "):
            check(rounded, torch.float32, seed, tight=False)


@pytest.mark.parametrize("bits", [10, 13], ids=["as-tf32", "8-times-finer"])
def test_rejects_a_float32_kernel_whose_keys_were_rounded(bits: int) -> None:
    def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(k)
        return attend(q, torch.ldexp((fraction * 2**bits).round() / 2**bits, exponent), v)

    for seed in range(30):
        with pytest.raises(AssertionError, match="attention: "):
            check(rounded, torch.float32, seed, tight=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "bug",
    [
        last_token_dropped,
        one_head_wrong,
        scale_off_by_1_percent,
        one_element_wrong,
        never_written,
    ],
)
def test_rejects_planted_bugs(bug: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for seed in range(30):
        with pytest.raises(AssertionError, match="attention: "):
            check(bug, dtype, seed, tight=False)


def test_message_names_the_worst_coordinate() -> None:
    with pytest.raises(AssertionError, match=r"at \(5, 2, 7\)"):
        check(one_element_wrong, torch.float32, 0, tight=False)
    with pytest.raises(AssertionError, match=r"not finite at \(15, 7, 63\)"):
        check(never_written, torch.float32, 0, tight=False)


def test_one_rounding_of_the_exact_answer_is_accepted() -> None:
    exact = torch.rand(1000, generator=torch.Generator().manual_seed(0)).double() + 1
    for dtype in DTYPES:
        rounded = exact.to(dtype)
        assert_matches(rounded, exact, rounded, tight=True)


def test_refuses_to_compare_unlike_things() -> None:
    ones = torch.ones(4)
    with pytest.raises(AssertionError, match="not float64"):
        assert_matches(ones, ones, ones)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_matches(ones, torch.ones(1).double(), ones)
    with pytest.raises(AssertionError, match="eager is"):
        assert_matches(ones, ones.double(), ones.half())
    assert_matches(torch.empty(0), torch.empty(0).double(), torch.empty(0))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.empty(3, dtype=dtype),
        lambda dtype: torch.empty_like(torch.zeros(3, dtype=dtype)),
        lambda dtype: torch.empty_strided((3,), (2,), dtype=dtype),
        lambda dtype: torch.zeros(1, dtype=dtype).new_empty(3),
        lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided((3,), (1,)),
    ],
)
def test_uninitialised_memory_is_poisoned(make: Callable[[torch.dtype], Tensor]) -> None:
    for dtype in (*DTYPES, torch.float64):
        assert bool(make(dtype).isnan().all())
    for dtype in (torch.int16, torch.int32, torch.int64):
        assert make(dtype).tolist() == [torch.iinfo(dtype).max] * 3
    assert make(torch.uint8).tolist() == [255] * 3


def test_poison_ends_with_its_test() -> None:
    assert torch.empty.__name__ == "empty"
    assert type(torch.empty).__name__ == "builtin_function_or_method"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_raw_bytes_are_poisoned_as_nan_of_any_float(dtype: torch.dtype) -> None:
    raw = poison_tensor(torch.zeros(64, dtype=torch.int8))
    assert bool(raw.view(dtype).isnan().all())


def test_float8_is_poisoned() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert bool(poison_tensor(torch.zeros(4).to(dtype)).float().isnan().all())
