"""What tests compare with: the one tolerance rule of the project, and poisoned memory.

Tolerances live nowhere else. Addressing (which token, block, head or byte) is tested exactly,
with values that make any mix-up visible, never through a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

_RAW_BYTE_TYPES = (torch.int8, torch.uint8)
_FLOAT8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def assert_matches(
    actual: Tensor, ref_f64: Tensor, eager: Tensor, *, tight: bool = False, what: str = "result"
) -> None:
    """Fail unless `actual` is as right as its dtype allows.

    actual:  the result under test, float32, float16 or bfloat16, any shape.
    ref_f64: the exact result, float64, same shape.
    eager:   what plain eager PyTorch gets from the same inputs in actual's dtype, same shape.
    tight:   the code under test computes in float32 and rounds once: half the RMS allowance.

    Two conditions, both needed (each alone passes planted bugs, see tests/test_helpers.py):
    RMS(error) / RMS(ref) < 1 eps of actual's dtype, and max |error| <= 2 x eager's.
    In float32 eager has no more precise type inside: it is but one of the roundings that right code
    comes to, and others, by the instructions of a CPU's matrix products, were seen to be 3.1 times
    (of large single elements 6 times) as far off. There 4 x eager's RMS error may stand in for the
    eps, and the max is 4 x eager's or 32 eps of the largest element: what computes in TF32,
    float16 or bfloat16 inside is a hundred times farther off.
    """
    _check_shapes(actual, ref_f64, eager)
    if actual.numel() == 0:
        return
    error = actual.detach().double().cpu() - ref_f64.detach().cpu()
    eager_error = eager.detach().double().cpu() - ref_f64.detach().cpu()
    assert bool(eager_error.isfinite().all()), f"{what}: eager itself is not finite"
    if not bool(error.isfinite().all()):
        at = tuple(int(i) for i in (~error.isfinite()).nonzero()[0])
        raise AssertionError(f"{what}: not finite at {at}: {actual[at].item()}")

    eps = torch.finfo(actual.dtype).eps
    is_float32 = actual.dtype == torch.float32
    factor = 4 if is_float32 else 2
    rms_limit = eps * _rms(ref_f64) * (0.5 if tight and not is_float32 else 1.0)
    if is_float32:
        rms_limit = max(rms_limit, factor * _rms(eager_error))
    # Rounding the exact answer once is always right, even where eager happens to be exact.
    rounding = (32 if is_float32 else 0.5) * eps * float(ref_f64.abs().max())
    max_limit = max(factor * float(eager_error.abs().max()), rounding)

    rms, worst = _rms(error), float(error.abs().max())
    if rms <= rms_limit and worst <= max_limit:
        return
    flat = int(error.abs().argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
    raise AssertionError(
        f"{what}: RMS error {rms:.3g} (limit {rms_limit:.3g}), "
        f"max error {worst:.3g} (limit {max_limit:.3g}, {factor}x eager) at {at}: "
        f"got {actual[at].item():.9g}, expected {ref_f64[at].item():.9g}; "
        f"{int((error.abs() > max_limit).sum())} of {error.numel()} over the max limit"
    )


def _check_shapes(actual: Tensor, ref_f64: Tensor, eager: Tensor) -> None:
    assert ref_f64.dtype == torch.float64, f"the reference is {ref_f64.dtype}, not float64"
    assert actual.dtype == eager.dtype, f"eager is {eager.dtype}, the result {actual.dtype}"
    assert actual.shape == ref_f64.shape == eager.shape, (
        f"shapes differ: result {tuple(actual.shape)}, reference {tuple(ref_f64.shape)}, "
        f"eager {tuple(eager.shape)}"
    )


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def poison_tensor(tensor: Tensor) -> Tensor:
    """Fill with NaN (floats), -1 or 255 (bytes: NaN as any float), the maximum (other ints)."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    with torch.no_grad():
        if tensor.dtype in _FLOAT8_TYPES:
            tensor.view(torch.uint8).fill_(0x7F)
        elif tensor.dtype in _RAW_BYTE_TYPES:
            tensor.fill_(-1 if tensor.dtype == torch.int8 else 255)
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


@contextmanager
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every way to get uninitialised memory hand out poisoned memory."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return poison_tensor(make(*args, **kwargs))

        return call

    with monkeypatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
