"""Quantising: the nearest value of each format, found by brute force in float64; and errors within bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from rayk.kernels.quantise import Quantised, dequantise, quantise
from rayk.kv.format_bounds import error_bound
from rayk.kv.formats import FORMATS
from tests.each import each
from tests.markers import interpreted

IMPLS = ("reference", pytest.param("triton", marks=interpreted))
QUANTISED = ("fp8_e4m3", "fp8_e4m3_token_head", "nvfp4")
E2M1 = [s * m for s in (1, -1) for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""By code, from the definition: sign, two bits of exponent (bias 1), one of mantissa."""
E4M3 = [
    s * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
    for s, e, m in itertools.product((1, -1), range(16), range(8))
]
"""By code likewise: four bits of exponent (bias 7), three of mantissa; codes 0x7F and 0xFF are NaN."""


def some_values(heads: int = 3, size: int = 48, seed: int = 0) -> Tensor:
    """Rows whose sizes lie far apart, zeros of both signs, and ties of both formats."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, heads, size, generator=generator)
    x *= torch.exp(3 * torch.randn(40, heads, 1, generator=generator))
    x[0], x[1] = 0.0, -0.0
    x[2] *= 1e-12
    x[3, :, 1::2] = 0.0
    middles = [(a + b) / 2 for a, b in itertools.pairwise(sorted(E4M3[:127]))]
    x[4:6] = torch.tensor(middles)[torch.arange(2 * heads * size) % 126].view(2, heads, size)
    x[6:8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])[torch.arange(size) % 8]
    return x


def nearest(values: np.ndarray, table: list[float]) -> np.ndarray:
    """Codes of the nearest of `table`, of two equally near the even one; sign zero as the value has it."""
    half = np.array(table[: len(table) // 2])
    distance = np.abs(np.abs(values)[..., None] - half)
    codes = np.argmin(distance, -1)
    # argmin takes the first of equals, whose code is even or odd.
    tied = distance[..., :-1] == distance[..., 1:]
    is_tie = np.take_along_axis(np.pad(tied, [(0, 0)] * values.ndim + [(0, 1)]), codes[..., None], -1)[..., 0]
    codes = np.where(is_tie & (codes % 2 == 1), codes + 1, codes)
    return codes + np.where(np.signbit(values), len(table) // 2, 0)


def as_codes(stored: Quantised) -> np.ndarray:
    return stored.data.view(torch.uint8).numpy()


@pytest.mark.parametrize("scale", [1.0, 0.37, 64.0])
@pytest.mark.parametrize("impl", IMPLS)
def test_e4m3_is_the_nearest_to_the_quotient(impl: str, scale: float) -> None:
    x = some_values()
    stored = quantise(x, FORMATS["fp8_e4m3"], scale, impl=impl)
    quotients = x.numpy() / np.float32(scale)
    np.testing.assert_array_equal(as_codes(stored), _e4m3(quotients))
    assert stored.scales is None


def _e4m3(quotients: np.ndarray) -> np.ndarray:
    """Codes of the nearest e4m3, the NaN codes left out."""
    table = E4M3[:127]
    codes = nearest(np.abs(quotients).astype(np.float64), [*table, *(-t for t in table)])
    return codes + np.where(np.signbit(quotients), 128, 0)


@pytest.mark.parametrize("impl", IMPLS)
def test_e4m3_agrees_with_torchs_own_cast(impl: str) -> None:
    x = torch.cat(
        [some_values().flatten(), torch.linspace(-500, 500, 1_001), torch.tensor([448.0, 464, 1e30])]
    )
    stored = quantise(x, FORMATS["fp8_e4m3"], impl=impl)
    wanted = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(stored.data.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("impl", IMPLS)
def test_every_e4m3_code_is_read_as_it_is_defined(impl: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    found = dequantise(Quantised(codes, None), FORMATS["fp8_e4m3"], 2.0, impl=impl).double().flatten().numpy()
    wanted = np.array([np.nan if code % 128 == 127 else 2 * value for code, value in enumerate(E4M3)])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_every_pair_of_e2m1_codes_is_read_as_it_is_defined(impl: str) -> None:
    """The first of two elements lies in the low half of a byte; a block's scale multiplies all 16."""
    packed = torch.arange(256, dtype=torch.uint8).view(32, 8)
    scales = torch.full((32, 1), 0.75).to(torch.float8_e4m3fn)
    found = dequantise(Quantised(packed, scales), FORMATS["nvfp4"], 4.0, impl=impl).flatten().tolist()
    assert found == [3 * E2M1[half] for byte in range(256) for half in (byte % 16, byte // 16)]


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("impl", IMPLS)
def test_nvfp4_is_as_published(impl: str, scale: float) -> None:
    """Per 16 elements the e4m3 nearest to amax over 6 times the layer's scale; then the nearest e2m1."""
    x = some_values()
    stored = quantise(x, FORMATS["nvfp4"], scale, impl=impl)
    blocks = x.numpy().reshape(40, 3, 3, 16)
    wanted = _e4m3(np.abs(blocks).max(-1) / (np.float32(6) * np.float32(scale)))
    assert stored.scales is not None
    np.testing.assert_array_equal(stored.scales.view(torch.uint8).numpy(), wanted)
    divisors = np.array(E4M3, dtype=np.float32)[wanted][..., None] * np.float32(scale)
    with np.errstate(invalid="ignore", divide="ignore"):
        quotients = np.where(divisors == 0, np.float32(0), blocks / divisors)
    codes = nearest(quotients.astype(np.float64), E2M1).reshape(40, 3, 24, 2)
    np.testing.assert_array_equal(as_codes(stored), codes[..., 0] + 16 * codes[..., 1])


@pytest.mark.parametrize("impl", IMPLS)
def test_token_head_scales_are_the_largest_over_448(impl: str) -> None:
    x = some_values(size=20)
    stored = quantise(x, FORMATS["fp8_e4m3_token_head"], impl=impl)
    wanted = np.maximum(np.abs(x.numpy()).max(-1, keepdims=True) / np.float32(448), np.float32(2.0**-126))
    assert stored.scales is not None
    np.testing.assert_array_equal(stored.scales.numpy(), wanted)
    np.testing.assert_array_equal(as_codes(stored), _e4m3(x.numpy() / wanted))


@each("scale", [1.0, 0.05])
@each("name", FORMATS)
@pytest.mark.parametrize("impl", IMPLS)
def test_what_comes_back_is_within_the_formats_bound(impl: str, name: str, scale: float) -> None:
    kv_format = FORMATS[name]
    used = scale if kv_format.has_layer_scales else 1.0
    x = some_values()
    back = dequantise(quantise(x, kv_format, used, impl=impl), kv_format, used, impl=impl)
    error = (back.double() - x.double()).abs().numpy()
    bound = error_bound(kv_format, x.double().numpy(), used)
    assert np.all(error <= bound), np.argwhere(error > bound)[:3]
    # And no looser than it need be: something comes near to it.
    assert name == "float32" or (error > 0.9 * bound)[bound > 0].any()


@pytest.mark.parametrize("name", QUANTISED)
def test_the_worst_relative_error_is_reached_and_not_passed(name: str) -> None:
    """Over values within the normal range, whose sizes sweep all of it finely."""
    kv_format = FORMATS[name]
    x = torch.rand(50_000, 16, generator=torch.Generator().manual_seed(1)) * 0.7 + 0.3
    x[:, 0] = 1.0
    x *= torch.linspace(1.0, 64.0, 50_000).view(-1, 1)
    back = dequantise(quantise(x, kv_format), kv_format)
    of = x if kv_format.scales == "tensor" else x.amax(-1, keepdim=True)
    worst = float(((back.double() - x.double()).abs() / of).max())
    half_ulp = 1 / (2.0**4 + 1)  # of e4m3, relative to 1 + 2^-4
    wanted = {
        "fp8_e4m3": half_ulp,
        # The largest becomes 448, and steps above 256 are 32.
        "fp8_e4m3_token_head": 16 / 448,
        # Between 4 and 6 steps are 2: off by 1, times a scale that is amax / 6 and itself off.
        "nvfp4": (1 + half_ulp) / 6,
    }[name]
    assert 0.97 * wanted < worst <= wanted * (1 + 1e-6)


@each("name", QUANTISED)
@each("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("impl", IMPLS)
def test_nan_stays_nan_and_the_rest_finite(impl: str, name: str, bad: float) -> None:
    """An infinity, too: one that saturates would never be seen again."""
    x = torch.ones(3, 32)
    x[0, 3], x[1, 5] = bad, 1e38
    back = dequantise(quantise(x, FORMATS[name], impl=impl), FORMATS[name], impl=impl)
    shared = {"fp8_e4m3": slice(3, 4), "fp8_e4m3_token_head": slice(None), "nvfp4": slice(0, 16)}[name]
    wanted = torch.zeros(3, 32, dtype=torch.bool)
    wanted[0, shared] = True
    assert torch.equal(back.isnan(), wanted)
    assert back[1:].isfinite().all()


@each("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@each("name", QUANTISED)
@pytest.mark.parametrize("impl", IMPLS)
def test_dtypes_of_what_comes_back(impl: str, name: str, dtype: torch.dtype) -> None:
    stored = quantise(some_values(seed=3), FORMATS[name], 0.5)
    exact = dequantise(stored, FORMATS[name], 0.5, dtype=torch.float64)
    found = dequantise(stored, FORMATS[name], 0.5, dtype=dtype, impl=impl)
    assert found.dtype == dtype
    # Element times scale in float32, then rounded: what float64 gives, but for ties of the narrow dtype.
    assert torch.equal(found, exact.float().to(dtype) if dtype != torch.float64 else exact)
