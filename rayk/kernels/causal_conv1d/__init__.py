"""Causal depthwise convolution over packed sequences that keeps the last inputs of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.kernels.causal_conv1d.reference import causal_conv1d_reference
from rayk.kernels.causal_conv1d.torch_cpu import causal_conv1d_torch
from rayk.kernels.states import is_dense_inside

if TYPE_CHECKING:
    import torch

    from rayk.kernels.segments import Segments

__all__ = ["causal_conv1d", "causal_conv1d_reference", "causal_conv1d_torch"]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    segments: Segments,
    *,
    activation: str | None = "silu",
    impl: str | None = None,
) -> torch.Tensor:
    """y[t, c] = act(bias[c] + sum over w of weight[c, w] * x[t - (W - 1) + w, c]): [T, C] in x's dtype.

    x [T, C] holds the step's packed tokens (a slice of a wider tensor will do); weight [C, W], W >= 2;
    bias [C] or None; computed in float32. What lies before a request's first token comes from `state`
    [B, U, D, W - 1], C = U * D: a request's last W - 1 inputs, the oldest first, zeros where a sequence
    has fewer. It is read, and written where segments end, as `segments` say; every other slot keeps its
    bytes. The view may have any strides in B and U; D and the taps are dense.

    `activation`: silu or None. `impl`: reference, torch or triton; None takes triton on CUDA, else torch.
    Source: mamba2/modeling_mamba2.py:122 of transformers.
    """
    num_channels, width = weight.shape
    assert width >= 2, "a convolution of one tap keeps nothing"
    assert x.shape[1] == num_channels == state.shape[1] * state.shape[2], (x.shape, state.shape)
    assert state.shape[3] == width - 1, (state.shape, weight.shape)
    assert is_dense_inside(state), "the taps of a unit must be dense"
    assert activation in (None, "silu"), f"unknown activation {activation!r}"
    if impl is None:
        impl = "triton" if x.is_cuda else "torch"
    if impl == "reference":
        return causal_conv1d_reference(x, weight, bias, state, segments, activation=activation)
    if impl == "torch":
        return causal_conv1d_torch(x, weight, bias, state, segments, activation=activation)
    if impl == "triton":
        from rayk.kernels.causal_conv1d.triton import causal_conv1d_triton

        return causal_conv1d_triton(x, weight, bias, state, segments, activation=activation)
    raise AssertionError(f"unknown causal_conv1d implementation {impl!r}")
