"""Building routed experts: whole experts go to ranks, as evenly as they can; the router is on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rayk.models.builders.experts import build_experts
from rayk.models.builders.mlp import build_mlp
from rayk.models.layers.linear import Linear
from rayk.models.layers.moe import Latent, Moe, SharedExpert
from rayk.models.layers.router import Router
from rayk.models.pieces import Rows
from rayk.parallel import shard

if TYPE_CHECKING:
    from rayk.models.builders.context import Build
    from rayk.models.config import ExpertsConfig


def build_moe(build: Build, index: int, mlp: ExpertsConfig) -> Moe:
    """The router of layer `index`, the rank's experts, and its part of the shared one."""
    held = shard.shard_range(mlp.num_experts, *build.tp)
    return Moe(
        router=_router(build, index, mlp),
        experts=build_experts(build, index, mlp, held),
        first_expert=held.start,
        config=mlp,
        comm=build.comm,
        latent=None if mlp.latent_size is None else _latent(build, index, mlp, mlp.latent_size),
        shared=_shared(build, index, mlp),
        reduce=build.reduce,
    )


def _router(build: Build, index: int, mlp: ExpertsConfig) -> Router:
    config, total = mlp.router, mlp.num_experts
    every = (Rows("router", total, (range(total),)),)
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
    return Router(Linear(weight, bias), config, mlp.num_chosen, correction)


def _latent(build: Build, index: int, mlp: ExpertsConfig, size: int) -> Latent:
    every = (range(size),)
    return Latent(
        down=build.linear(index, (Rows("latent_down", size, every),), bias=mlp.latent_bias),
        up=build.row_parallel(index, Rows("latent_up", size, every), bias=mlp.latent_bias, reduce=False),
    )


def _shared(build: Build, index: int, mlp: ExpertsConfig) -> SharedExpert | None:
    if mlp.shared is None:
        return None
    gate = None
    if mlp.shared_gate:
        gate = build.linear(index, (Rows("shared_sigmoid", 1, (range(1),)),), bias=False)
    return SharedExpert(mlp=build_mlp(replace(build, reduce=False), index, mlp.shared, "shared_"), gate=gate)
