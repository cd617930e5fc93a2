"""Which experts a token goes to, and with what weights.

Shapes: T tokens, E experts of the whole model, K chosen ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from rayk.kernels.choose_experts import ExpertChoice, choose_experts
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
        assert (correction is not None) == (config.scoring == "sigmoid"), config
        self.linear = linear
        self.correction = correction
        self._config = config
        self._choice = ExpertChoice(
            num_chosen=num_chosen,
            scoring=config.scoring,
            renormalise=config.renormalise,
            scale=config.scale,
            least=_SMALLEST_SUM if config.scoring == "sigmoid" else 0.0,
            num_groups=config.num_groups,
            num_chosen_groups=config.num_chosen_groups,
        )

    def forward(self, x: torch.Tensor) -> Routes:
        return self.choose(self.linear.forward(x.float() if self._config.wide else x))

    def choose(self, logits: torch.Tensor) -> Routes:
        """logits [T, E]"""
        return Routes(*choose_experts(logits, self.correction, self._choice))


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
