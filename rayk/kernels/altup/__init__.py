"""Alternating updates (AltUp) of a residual stream of several: each in one launch in place of nine or ten.

S streams, T packed tokens, D elements of a hidden state. Source: gemma3n/modeling_gemma3n.py of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayk.kernels.altup.reference import correct_reference, predict_reference
from rayk.kernels.dispatch import default_impl
from rayk.kernels.pointwise import rms_norm

__all__ = ["StreamRouter", "correct_streams", "predict_streams"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRouter:
    """Weighs the streams of a token by one of them."""

    norm: torch.Tensor
    """[D] float32, the weight of a norm as rms_norm's with `wide`."""
    eps: float
    scale: float
    """Factor of the normed stream, rounded to the model's dtype."""
    weight: torch.Tensor
    """[S, D]"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """tanh(weight (norm(x) * scale)): [T, D] -> [T, S]."""
        normed = rms_norm(x, self.norm, eps=self.eps, wide=True) * self.scale
        return torch.tanh(torch.nn.functional.linear(normed, self.weight).float()).to(x.dtype)


def predict_streams(
    streams: torch.Tensor,
    router: StreamRouter,
    predictor: torch.Tensor,
    *,
    active: int,
    impl: str | None = None,
) -> torch.Tensor:
    """Add to each stream of [S, T, D] a weighted sum of all: row (to, from) of predictor [S * S, S], times
    what the router makes of the `active` stream, weighs stream `from` in the prediction of `to`.

    `impl`: reference (torch) or triton; None takes triton on CUDA.
    """
    if _impl(streams, impl) == "reference":
        return predict_reference(streams, router.forward(streams[active]), predictor)
    from rayk.kernels.altup.triton import predict_triton

    return predict_triton(streams, router, predictor, active=active)


def correct_streams(
    predicted: torch.Tensor,
    computed: torch.Tensor,
    router: StreamRouter,
    corrector: torch.Tensor,
    *,
    active: int,
    impl: str | None = None,
) -> torch.Tensor:
    """Correct predicted [S, T, D] by how far the computed `active` stream [T, D] is from its prediction,
    times one more than corrector [S, S] times what the router makes of it. `impl` is as of
    predict_streams."""
    if _impl(predicted, impl) == "reference":
        return correct_reference(predicted, computed, router.forward(computed), corrector, active=active)
    from rayk.kernels.altup.triton import correct_triton

    return correct_triton(predicted, computed, router, corrector, active=active)


def _impl(x: torch.Tensor, impl: str | None) -> str:
    assert impl in (None, "reference", "triton"), f"unknown implementation {impl!r}"
    return impl or ("triton" if default_impl(x.is_cuda) == "triton" else "reference")
