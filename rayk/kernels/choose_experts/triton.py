"""The choice of experts on a GPU: a program chooses a token's, the best ones one after the other."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rayk.kernels.elements import sigmoid
from rayk.kernels.interpreter import launching, widened


@triton.jit
def _best(values, places, last):
    """Return the lowest place of the largest value; of a row of NaN the last one."""
    is_best = values == tl.max(values, 0)
    return tl.minimum(tl.min(tl.where(is_best, places, last), 0), last)


@triton.jit
def _in_best_groups(
    ranked, o_e, NUM: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, PADDED: tl.constexpr
):
    """Leave -inf outside the groups whose two best have the largest sums."""
    SIZE: tl.constexpr = NUM // GROUPS
    o_g = tl.arange(0, PADDED)
    sums = tl.full((PADDED,), float("-inf"), dtype=tl.float32)
    for i_g in range(GROUPS):
        own = tl.where(o_e // SIZE == i_g, ranked, float("-inf"))
        first = _best(own, o_e, NUM - 1)
        second = tl.max(tl.where(o_e == first, float("-inf"), own), 0)
        sums = tl.where(o_g == i_g, tl.max(own, 0) + second, sums)
    kept = ranked != ranked
    for _ in range(KEPT):
        best = _best(sums, o_g, GROUPS - 1)
        kept |= o_e // SIZE == best
        sums = tl.where(o_g == best, float("-inf"), sums)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit
def choose_experts_kernel(
    logits,
    correction,
    experts,
    weights,
    stride,
    scale,
    least,
    NUM: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
):
    """Grid: (tokens,). `scale` multiplies the weights; `least` is added to what they are divided by."""
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, PADDED)
    m_e = o_e < NUM
    b_value = tl.load(logits + i_t * stride + o_e, mask=m_e, other=float("-inf")).to(tl.float32)
    most = tl.max(b_value, 0)
    total = tl.sum(tl.exp(b_value - most), 0)
    ranked = b_value
    if SCORING == "sigmoid":
        b_value = sigmoid(b_value)
        ranked = b_value + tl.load(correction + o_e, mask=m_e, other=float("-inf"))
        if KEPT < GROUPS:
            ranked = _in_best_groups(ranked, o_e, NUM, GROUPS, KEPT, PADDED_GROUPS)
    o_k = tl.arange(0, PADDED_CHOSEN)
    m_k = o_k < CHOSEN
    b_expert = tl.zeros((PADDED_CHOSEN,), dtype=tl.int32)
    b_weight = tl.full((PADDED_CHOSEN,), float("-inf"), dtype=tl.float32)
    for i_k in range(CHOSEN):
        best = _best(ranked, o_e, NUM - 1)
        b_expert = tl.where(o_k == i_k, best, b_expert)
        b_weight = tl.where(o_k == i_k, tl.sum(tl.where(o_e == best, b_value, 0.0), 0), b_weight)
        ranked = tl.where(o_e == best, float("-inf"), ranked)
    if SCORING == "softmax_chosen":
        b_weight = tl.exp(b_weight - tl.max(b_weight, 0))
        b_weight = b_weight / tl.sum(b_weight, 0)
    elif SCORING == "softmax_all":
        b_weight = tl.exp(b_weight - most) / total
    elif SCORING == "sigmoid_chosen":
        b_weight = sigmoid(b_weight)
    if RENORMALISES:
        b_weight = b_weight / (tl.sum(tl.where(m_k, b_weight, 0.0), 0) + least)
    b_weight *= scale
    tl.store(experts + i_t * CHOSEN + o_k, b_expert.to(tl.int64), mask=m_k)
    tl.store(weights + i_t * CHOSEN + o_k, b_weight.to(weights.dtype.element_ty), mask=m_k)


def choose_experts_triton(
    logits: torch.Tensor, correction: torch.Tensor | None, choice: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, num_chosen, num_groups = logits.dtype, choice.num_chosen, choice.num_groups
    logits = widened(logits)
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1, "dense logits"
    assert num_experts % num_groups == 0, (num_experts, num_groups)
    experts = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, num_chosen, dtype=logits.dtype, device=logits.device)
    if num_tokens:
        padded = triton.next_power_of_2(num_experts)
        with launching():
            choose_experts_kernel[(num_tokens,)](
                logits,
                correction,
                experts,
                weights,
                logits.stride(0),
                float(choice.scale),
                float(choice.least),
                NUM=num_experts,
                PADDED=padded,
                CHOSEN=num_chosen,
                PADDED_CHOSEN=triton.next_power_of_2(num_chosen),
                SCORING=choice.scoring,
                RENORMALISES=choice.renormalise,
                GROUPS=num_groups,
                KEPT=choice.num_chosen_groups,
                PADDED_GROUPS=triton.next_power_of_2(num_groups),
                num_warps=1 if padded <= 256 else 4,
            )
    return experts, weights.to(dtype)
