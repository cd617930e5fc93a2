"""The gated delta rule: linear attention whose state forgets by a gate and overwrites what a key held.

Per value head, with state S [Dk, Dv], unit-length q and k, decay exp(g) and writing strength beta:
S = exp(g) S; S += k (beta (v - S^T k))^T; o = S^T (scale q). (arXiv:2412.06464; qwen3_next/
modeling_qwen3_next.py:460.)
"""

from __future__ import annotations

import torch

from rayk.kernels.dispatch import default_impl, implementation
from rayk.kernels.segments import Segments


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    key_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
    impl: str | None = None,
) -> torch.Tensor:
    """Run every request's tokens through its state. Returns [T, Hv, Dv] in v's dtype.

    q and k [T, Hk, Dk] (normalised to unit length here, 1e-6 under the root), v [T, Hv, Dv], g [T, Hv]
    float32 (log of the decay, at most 0), beta [T, Hv] float32. Value head i reads key head key_index[i]
    ([Hv] int64). All may have any strides but a dense last axis.

    state [B, Hv, Dk, Dv] float32 has a slot per B, with any strides of B and Hv. A request starts from its
    read slot (from zero with NO_SLOT) and writes its state to each segment's write slot (nowhere with
    NO_SLOT). No slot is written that another request reads.

    `impl`: reference, torch or triton; None takes triton on CUDA, else torch.
    """
    num_tokens, num_key_heads, key_size = k.shape
    assert q.shape == k.shape, "a query per key"
    assert v.shape[:2] == g.shape == beta.shape == (num_tokens, len(key_index)), "one per token, value head"
    assert state.shape[1:] == (len(key_index), key_size, v.shape[-1]), f"a state of {tuple(state.shape)}"
    assert state.stride()[2:] == (v.shape[-1], 1), "the state of a head must be dense"
    run = implementation("gated_delta_rule", impl or default_impl(state.is_cuda))
    return run(q, k, v, g, beta, key_index, state, segments, scale=scale)
