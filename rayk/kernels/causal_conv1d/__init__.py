"""Causal depthwise convolution over packed sequences, keeping the last inputs of each."""

from __future__ import annotations

import torch

from rayk.kernels.dispatch import default_impl, implementation
from rayk.kernels.segments import Segments
from rayk.kernels.states import is_dense_inside


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

    x [T, C] holds the step's packed tokens (a slice of a wider tensor works); weight [C, W], W >= 2; bias [C]
    or None; computed in float32. Inputs before a request's first token come from `state` [B, U, D, W - 1], C
    = U * D: a request's last W - 1 inputs, oldest first, zeros where a sequence has fewer. It is read, and
    written at segment ends, as `segments` says; other slots stay untouched. B and U may have any strides; D
    and the taps are dense.

    `activation`: silu or None. `impl`: reference, torch or triton; None takes triton on CUDA, else torch.
    Source: mamba2/modeling_mamba2.py:122 of transformers.
    """
    num_channels, width = weight.shape
    assert width >= 2, "a convolution of one tap keeps nothing"
    assert x.shape[1] == num_channels == state.shape[1] * state.shape[2], (x.shape, state.shape)
    assert state.shape[3] == width - 1, (state.shape, weight.shape)
    assert is_dense_inside(state), "the taps of a unit must be dense"
    assert activation in (None, "silu"), f"unknown activation {activation!r}"
    run = implementation("causal_conv1d", impl or default_impl(x.is_cuda))
    return run(x, weight, bias, state, segments, activation=activation)
