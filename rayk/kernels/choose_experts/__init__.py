"""The choice of experts from a router's logits: one launch in place of four to sixteen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayk.kernels.choose_experts.reference import choose_experts_reference
from rayk.kernels.dispatch import default_impl, implementation

__all__ = ["ExpertChoice", "choose_experts"]

SCORINGS = ("softmax_chosen", "softmax_all", "sigmoid_chosen", "sigmoid")


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How experts are chosen; the scorings are those of RouterConfig."""

    num_chosen: int
    scoring: str
    renormalise: bool = False
    scale: float = 1.0
    least: float = 0.0
    """Added to the sum that weights are divided by."""
    num_groups: int = 1
    num_chosen_groups: int = 1

    def __post_init__(self) -> None:
        assert self.scoring in SCORINGS, self.scoring
        assert self.scoring == "sigmoid" or self.num_groups == self.num_chosen_groups, "no groups"


def choose_experts(
    logits: torch.Tensor, correction: torch.Tensor | None, choice: ExpertChoice, *, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K experts of each token as int64 [T, K] and their weights in the dtype of logits [T, E]; float32
    inside.

    `correction`: float32 [E], with scoring "sigmoid". Equal scores are ordered by torch.topk, or the lowest
    expert first. `impl`: reference (torch) or triton; None takes triton on CUDA.
    """
    assert (correction is not None) == (choice.scoring == "sigmoid"), choice
    if impl is None:
        impl = "triton" if default_impl(logits.is_cuda) == "triton" else "reference"
    if impl == "reference":
        return choose_experts_reference(logits, correction, choice)
    experts, weights = implementation("choose_experts", impl)(logits, correction, choice)
    return experts, weights
