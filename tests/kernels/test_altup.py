"""Alternating updates against transformers' Gemma3nTextAltUp, in float64 and eagerly."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

from rayk.kernels.altup import StreamRouter, correct_streams, predict_streams
from tests.each import each
from tests.helpers import assert_matches, poison
from tests.markers import gpu, interpreted

IMPLS = ("reference", pytest.param("triton", marks=interpreted))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poison(monkeypatch):
        yield


def theirs(num_streams: int, active: int, size: int, dtype: torch.dtype) -> Any:
    config = Gemma3nTextConfig(hidden_size=size, altup_num_inputs=num_streams, altup_active_idx=active)
    module = Gemma3nTextAltUp(config).eval()
    generator = torch.Generator().manual_seed(num_streams)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        # Wide apart, and not flat: tanh bends between.
        module.modality_router.weight.mul_(size**0.5)
        module.router_input_scale = torch.tensor(size**-1.0).to(dtype)
    return module.to(dtype).requires_grad_(False)


def router_of(module: Any) -> StreamRouter:
    norm = module.router_norm
    return StreamRouter(
        norm=norm.weight.float(),
        eps=norm.eps,
        scale=float(module.router_input_scale),
        weight=module.modality_router.weight,
    )


def check(num_streams: int, active: int, size: int, dtype: torch.dtype, impl: str, device: str) -> None:
    module = theirs(num_streams, active, size, dtype).to(device)
    exactly = copy.deepcopy(module).double()
    generator = torch.Generator().manual_seed(size)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    streams, computed, router = draw(num_streams, 5, size), draw(5, 2 * size)[:, :size], router_of(module)
    found = predict_streams(streams, router, module.prediction_coefs.weight, active=active, impl=impl)
    exact = exactly.predict(streams.double()[:, None])[:, 0]
    assert_matches(found, exact, module.predict(streams[:, None])[:, 0])
    found = correct_streams(
        streams, computed, router, module.correction_coefs.weight, active=active, impl=impl
    )
    exact = exactly.correct(streams.double()[:, None], computed.double()[None])[:, 0]
    assert_matches(found, exact, module.correct(streams[:, None], computed[None])[:, 0])


@each("streams", [(4, 0), (3, 2), (1, 0)])
@each("size", [24, 104])
@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_streams_are_updated_as_gemma3ns(
    impl: str, dtype: torch.dtype, size: int, streams: tuple[int, int]
) -> None:
    check(*streams, size, dtype, impl, "cpu")


@gpu
@each("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check(4, 0, 2048, dtype, "triton", "cuda")
