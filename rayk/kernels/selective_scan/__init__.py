"""Mamba1's scan: every channel carries a state of its own."""

from __future__ import annotations

import torch

from rayk.kernels.dispatch import default_impl, implementation
from rayk.kernels.segments import Segments
from rayk.kernels.states import is_dense_inside


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None,
    state: torch.Tensor,
    segments: Segments,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Per channel, with dt = softplus(dt + dt_bias): h = exp(dt a) h + dt x b; y = h . c + d x, times silu(z)
    if z is given. Returns y [T, C] in x's dtype; computed in float32.

    x, dt (raw) and z [T, C], b and c [T, N] hold the step's packed tokens, with a dense last axis; a [C, N]
    (negative), d [C] and dt_bias [C] float32. h is read from `state` [B, U, C / U, N] float32, and written to
    it at segment ends, as `segments` says; other slots stay untouched. B and U may have any strides; the last
    two axes are dense.

    `impl`: reference, torch or triton; None takes triton on CUDA, else torch. Source:
    jamba/modeling_jamba.py:283 and :334 of transformers.
    """
    num_channels, state_size = a.shape
    assert x.shape[1] == num_channels == state.shape[1] * state.shape[2], (x.shape, state.shape)
    assert dt.shape == x.shape, (dt.shape, x.shape)
    assert b.shape[1] == c.shape[1] == state_size == state.shape[3], (b.shape, state.shape)
    assert is_dense_inside(state), "the states of a unit must be dense"
    run = implementation("selective_scan", impl or default_impl(x.is_cuda))
    return run(x, dt, a, b, c, d, dt_bias, z, state, segments)
