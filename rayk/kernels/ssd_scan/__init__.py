"""Mamba2's scan: a head's channels share one decay, so that chunks of tokens become matrix products."""

from __future__ import annotations

import torch

from rayk.kernels.dispatch import default_impl, implementation
from rayk.kernels.segments import Segments
from rayk.kernels.states import is_dense_inside


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    group_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Per head, with dt = softplus(dt + dt_bias) and g its group: h = exp(dt a) h + dt x b_g^T; y = h c_g + d
    x. Returns y [T, H, P] in x's dtype; computed in float32.

    x [T, H, P], dt [T, H] (raw), b and c [T, G, N] hold the step's packed tokens, with a dense last axis; a
    (negative), d and dt_bias [H] float32; group_index [H] int64 is each head's slot in G. h is read from
    `state` [B, H, P, N] float32, and written to it at segment ends, as `segments` says; other slots stay
    untouched. B and H may have any strides; the last two axes are dense.

    `impl`: reference, torch or triton; None takes triton on CUDA, else torch. Source:
    mamba2/modeling_mamba2.py:195 and :257 of transformers.
    """
    num_heads, head_size = x.shape[1:]
    state_size = b.shape[2]
    assert state.shape[1:] == (num_heads, head_size, state_size), (x.shape, b.shape, state.shape)
    assert c.shape == b.shape, (b.shape, c.shape)
    assert dt.shape[1] == len(a) == len(d) == len(dt_bias) == len(group_index) == num_heads, "one per head"
    assert is_dense_inside(state), "the state of a head must be dense"
    run = implementation("ssd_scan", impl or default_impl(x.is_cuda))
    return run(x, dt, a, b, c, d, dt_bias, group_index, state, segments)
