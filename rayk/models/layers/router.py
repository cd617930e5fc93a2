"""Which experts a token goes to, and with what weights.

Shapes: T tokens, E experts of the whole model, K chosen ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from rayk.models.build import Build
from rayk.models.config import ExpertsConfig, RouterConfig
from rayk.models.layers.linear import Linear
from rayk.models.pieces import Rows

_SMALLEST_SUM = 1e-20
"""Added to the sum of sigmoids that weights are divided by (deepseek_v3/modeling_deepseek_v3.py:152)."""


class Routes(NamedTuple):
    experts: torch.Tensor
    """[T, K] int64, global ids."""
    weights: torch.Tensor
    """[T, K], in the model's dtype, or float32 if the logits are."""


class ExpertRouter:
    """Chooses each token's experts, the same on every rank."""

    def __init__(
        self,
        linear: Linear,
        config: RouterConfig,
        num_chosen: int,
        correction: torch.Tensor | None = None,
    ) -> None:
        """`linear` gives logits [T, E]; its weight is float32 if config.wide. `correction`: float32 [E],
        added to the scores for choosing only."""
        assert config.scoring in ("softmax_chosen", "softmax_all", "sigmoid_chosen", "sigmoid"), config
        assert (correction is not None) == (config.scoring == "sigmoid"), config
        self.linear = linear
        self.correction = correction
        self._config = config
        self._num_chosen = num_chosen

    def forward(self, x: torch.Tensor) -> Routes:
        return self.choose(self.linear.forward(x.float() if self._config.wide else x))

    def choose(self, logits: torch.Tensor) -> Routes:
        """logits [T, E]. Equal scores are ordered by torch.topk."""
        experts, weights = self._chosen(logits)
        if self._config.renormalise:
            least = _SMALLEST_SUM if self._config.scoring == "sigmoid" else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + least)
        if self._config.scale != 1.0:
            weights = weights * self._config.scale
        return Routes(experts, weights.to(logits.dtype))

    def _chosen(self, logits: torch.Tensor) -> Routes:
        """Choose experts, with unscaled weights in float32."""
        if self._config.scoring == "softmax_chosen":
            best = logits.topk(self._num_chosen, dim=-1)
            return Routes(best.indices, best.values.softmax(-1, dtype=torch.float32))
        if self._config.scoring == "sigmoid_chosen":
            best = logits.topk(self._num_chosen, dim=-1)
            return Routes(best.indices, best.values.float().sigmoid())
        if self._config.scoring == "softmax_all":
            best = logits.softmax(-1, dtype=torch.float32).topk(self._num_chosen, dim=-1)
            return Routes(best.indices, best.values)
        assert self.correction is not None
        scores = logits.float().sigmoid()
        ranked = self._in_best_groups(scores + self.correction)
        experts = ranked.topk(self._num_chosen, dim=-1, sorted=False).indices
        return Routes(experts, scores.gather(1, experts))

    def _in_best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """[T, E] with -inf outside the groups whose two best scores have the largest sums."""
        groups, num_kept = self._config.num_groups, self._config.num_chosen_groups
        if num_kept == groups:
            return ranked
        grouped = ranked.view(len(ranked), groups, -1)
        kept = grouped.topk(2, dim=-1).values.sum(-1).topk(num_kept, dim=-1, sorted=False).indices
        left_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranked.device)
        left_out.scatter_(1, kept, value=False)
        masked: torch.Tensor = grouped.masked_fill(left_out[..., None], float("-inf"))
        return masked.flatten(1)


def build_router(build: Build, index: int, mlp: ExpertsConfig) -> ExpertRouter:
    config, total = mlp.router, mlp.num_experts
    every = (Rows.whole("router", total),)
    weight = build.pieces.stacked(index, every, "weight", (build.config.hidden_size,))
    bias = build.pieces.stacked(index, every, "bias", ()) if config.bias else None
    if config.wide:
        # Rounded to the model's dtype like other weights; only the product is float32.
        assert bias is None, config
        weight = weight.float()
    correction = None
    if config.scoring == "sigmoid":
        # Kept in float32 whatever the model's dtype (deepseek_v3/modeling_deepseek_v3.py:550).
        wide = replace(build.pieces, dtype=torch.float32)
        correction = wide.whole(build.name(index, "router.correction"), total)
    return ExpertRouter(Linear(weight, bias), config, mlp.num_chosen, correction)
