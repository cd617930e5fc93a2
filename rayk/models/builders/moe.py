"""Building routed experts: whole experts go to ranks, as evenly as they can; the router is on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.layers.moe import Experts, Moe
from rayk.models.pieces import Rows
from rayk.parallel import shard

if TYPE_CHECKING:
    import torch

    from rayk.models.builders.context import Build
    from rayk.models.config import ExpertsConfig


def build_moe(build: Build, index: int, mlp: ExpertsConfig) -> Moe:
    """The router of layer `index` and the rank's experts."""
    hidden, size, total = build.config.hidden_size, mlp.intermediate_size, mlp.num_experts
    held = shard.shard_range(total, *build.tp)

    def read(parameter: str, *shape: int) -> torch.Tensor:
        return build.pieces.experts(index, parameter, held, (total, *shape))

    experts = Experts.from_interleaved(
        gate_up=read("experts_gate_up.weight", hidden, 2 * size),
        gate_up_bias=read("experts_gate_up.bias", 2 * size),
        down=read("experts_down.weight", size, hidden),
        down_bias=read("experts_down.bias", hidden),
    )
    every = (Rows("router", total, (range(total),)),)
    return Moe(
        router=build.linear(index, every, bias=True),
        experts=experts,
        first_expert=held.start,
        config=mlp,
        comm=build.comm,
        reduce=build.reduce,
    )
