"""Every kernel call of a whole model beside its reference: which it is, where a GPU's logits are wrong."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_gpu import logits_of
from tests.families import ATTENTION, HYBRID
from tests.markers import gpu, thorough

MOST_APART = 0.02
"""Of two results in 16 bits, relative: each rounds once or twice."""
MOST_OF_ONE = 0.2
"""Of any number in them, relative to the largest: few wrong numbers among many do not show in a norm."""


def own_copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors(part)


def difference(found: Tensor, right: Tensor) -> str:
    """In words, if they are further apart than rounding; poison (NaN) is in the same places."""
    if not torch.equal(found.isnan(), right.isnan()):
        return "NaN in other places"
    found, right = found.double().nan_to_num(), right.double().nan_to_num()
    norm = float((found - right).norm() / right.norm().clamp_min(1e-9))
    most = float((found - right).abs().max() / right.abs().max().clamp_min(1e-9)) if found.numel() else 0.0
    return f"{norm:.3g} apart, one number {most:.3g}" if norm > MOST_APART or most > MOST_OF_ONE else ""


def beside_reference(kernel: Callable[..., Any], told: list[str]) -> Callable[..., Any]:
    """Call both, with copies of what the second may write; tell results and arguments that then differ."""

    @functools.wraps(kernel)
    def both(*arguments: Any, **options: Any) -> Any:
        copies = [own_copy(value) for value in arguments]
        found = kernel(*arguments, **options)
        right = kernel(*copies, **options | {"impl": "reference"})
        pairs = [*zip(tensors(found), tensors(right), strict=True)]
        pairs += [(a, b) for a, b in zip(arguments, copies, strict=True) if isinstance(a, Tensor)]
        for a, b in pairs:
            if a.is_floating_point() and (words := difference(a, b)):
                shapes = [(*x.shape, str(x.dtype), x.stride()) for x in arguments if isinstance(x, Tensor)]
                told.append(f"{kernel.__name__}: {words} in {tuple(a.shape)}, of {shapes}")
        return found

    return both


def watch(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> set[str]:
    """Put both in the place of every kernel that layers call, and return their names. Attention, which reads
    pages, has tests of its own."""
    watched = set()
    for module in [m for name, m in sys.modules.items() if name.startswith("rayk.models.layers.")]:
        for name, value in vars(module).copy().items():
            is_kernel = inspect.isfunction(value) and value.__module__.startswith("rayk.kernels.")
            if is_kernel and "impl" in inspect.signature(value).parameters and "attention" not in name:
                monkeypatch.setattr(module, name, beside_reference(value, told))
                watched.add(name)
    return watched


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", [*ATTENTION, *HYBRID])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=thorough), pytest.param("cuda", marks=gpu)])
def test_every_kernel_of_a_model_is_as_its_reference(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, device: str, family: str, dtype: str
) -> None:
    """150 tokens in three steps, the later ones from what the first leave behind."""
    told: list[str] = []
    path = checkpoint(family)
    assert watch(monkeypatch, told) >= {"rms_norm", "gated", "ssd_scan", "causal_conv1d", "gated_delta_rule"}
    logits = logits_of(path, dtype=dtype, device=device, cuda_graphs="never")
    assert logits.isfinite().all()
    assert not told, "\n".join(told[:5])
