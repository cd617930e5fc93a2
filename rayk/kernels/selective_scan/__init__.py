"""Mamba1's scan: every channel carries a state of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.kernels.selective_scan.reference import selective_scan_reference
from rayk.kernels.selective_scan.torch_cpu import selective_scan_torch
from rayk.kernels.states import is_dense_inside

if TYPE_CHECKING:
    import torch

    from rayk.kernels.segments import Segments

__all__ = ["selective_scan", "selective_scan_reference", "selective_scan_torch"]


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
    """Per channel, with dt = softplus(dt + dt_bias): h = exp(dt a) h + dt x b; y = h . c + d x, times
    silu(z) where z is given. Returns y [T, C] in x's dtype; computed in float32.

    x, dt (raw) and z [T, C], b and c [T, N] hold the step's packed tokens, their last axis dense; a [C, N]
    (negative), d [C] and dt_bias [C] float32. h starts from, and where segments end goes to, `state`
    [B, U, C / U, N] float32 as `segments` say; every other slot keeps its bytes. The view may have any
    strides in B and U; the last two axes are dense.

    `impl`: reference, torch or triton; None takes triton on CUDA, else torch.
    Source: jamba/modeling_jamba.py:283 and :334 of transformers.
    """
    num_channels, state_size = a.shape
    assert x.shape[1] == num_channels == state.shape[1] * state.shape[2], (x.shape, state.shape)
    assert dt.shape == x.shape, (dt.shape, x.shape)
    assert b.shape[1] == c.shape[1] == state_size == state.shape[3], (b.shape, state.shape)
    assert is_dense_inside(state), "the states of a unit must be dense"
    if impl is None:
        impl = "triton" if x.is_cuda else "torch"
    arguments = (x, dt, a, b, c, d, dt_bias, z, state, segments)
    if impl == "reference":
        return selective_scan_reference(*arguments)
    if impl == "torch":
        return selective_scan_torch(*arguments)
    if impl == "triton":
        from rayk.kernels.selective_scan.triton import selective_scan_triton

        return selective_scan_triton(*arguments)
    raise AssertionError(f"unknown selective_scan implementation {impl!r}")
