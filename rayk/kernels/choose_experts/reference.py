"""The choice of experts in torch: the definition, and what runs on a CPU."""

from __future__ import annotations

from typing import Any

import torch


def choose_experts_reference(
    logits: torch.Tensor, correction: torch.Tensor | None, choice: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, weights = _chosen(logits, correction, choice)
    if choice.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + choice.least)
    if choice.scale != 1.0:
        weights = weights * choice.scale
    return experts, weights.to(logits.dtype)


def _chosen(
    logits: torch.Tensor, correction: torch.Tensor | None, choice: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts, with unscaled weights in float32."""
    if choice.scoring == "softmax_chosen":
        best = logits.topk(choice.num_chosen, dim=-1)
        return best.indices, best.values.softmax(-1, dtype=torch.float32)
    if choice.scoring == "sigmoid_chosen":
        best = logits.topk(choice.num_chosen, dim=-1)
        return best.indices, best.values.float().sigmoid()
    if choice.scoring == "softmax_all":
        best = logits.softmax(-1, dtype=torch.float32).topk(choice.num_chosen, dim=-1)
        return best.indices, best.values
    assert correction is not None
    scores = logits.float().sigmoid()
    ranked = _in_best_groups(scores + correction, choice.num_groups, choice.num_chosen_groups)
    experts = ranked.topk(choice.num_chosen, dim=-1, sorted=False).indices
    return experts, scores.gather(1, experts)


def _in_best_groups(ranked: torch.Tensor, num_groups: int, num_kept: int) -> torch.Tensor:
    """[T, E] with -inf outside the groups whose two best scores have the largest sums."""
    if num_kept == num_groups:
        return ranked
    grouped = ranked.view(len(ranked), num_groups, -1)
    kept = grouped.topk(2, dim=-1).values.sum(-1).topk(num_kept, dim=-1, sorted=False).indices
    left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device)
    left_out.scatter_(1, kept, value=False)
    masked: torch.Tensor = grouped.masked_fill(left_out[..., None], float("-inf"))
    return masked.flatten(1)
