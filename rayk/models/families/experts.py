"""Routed experts: what config.json says of them, and what their weights are called.

For families that store one tensor per expert (WeightNames.experts "single"), or all experts' rows in one
("stacked"). gpt_oss has a form of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rayk.models.config import ExpertsConfig, MlpConfig, RouterConfig
from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from rayk.models.families.raw import RawConfig


def single_names(module: str, *, router: str, gated: bool = True) -> dict[str, str]:
    """Parameter -> name on disk, for the experts and the router of `module`, e.g. model.layers.{i}.mlp."""
    parts = ("gate", "up", "down") if gated else ("up", "down")
    return {
        "router.weight": f"{module}.{router}.weight",
        "router.correction": f"{module}.{router}.e_score_correction_bias",
        **{f"experts_{p}.weight": f"{module}.experts.{{{{e}}}}.{p}_proj.weight" for p in parts},
    }


def shared_names(module: str) -> dict[str, str]:
    """Parameter -> name on disk of a shared expert, e.g. model.layers.{i}.mlp.shared_experts."""
    return {
        f"shared_{name}.{part}": f"{module}.{name}_proj.{part}"
        for name in ("gate", "up", "down")
        for part in ("weight", "bias")
    }


JAMBA_NAMES: Mapping[str, str] = single_names("model.layers.{i}.feed_forward", router="router")
NEMOTRON_H_NAMES: Mapping[str, str] = {
    **single_names("backbone.layers.{i}.mixer", router="gate", gated=False),
    **shared_names("backbone.layers.{i}.mixer.shared_experts"),
    **{
        f"latent_{ours}.{part}": f"backbone.layers.{{i}}.mixer.{theirs}_latent_proj.{part}"
        for ours, theirs in (("down", "fc1"), ("up", "fc2"))
        for part in ("weight", "bias")
    },
}
_GRANITE = "model.layers.{i}"
GRANITE_NAMES: Mapping[str, str] = {
    "router.weight": f"{_GRANITE}.block_sparse_moe.router.layer.weight",
    "experts_gate_up.weight": f"{_GRANITE}.block_sparse_moe.input_linear.weight",
    "experts_down.weight": f"{_GRANITE}.block_sparse_moe.output_linear.weight",
    # The shared expert, and the whole feed-forward half of models without routed ones.
    **{f"{prefix}{name}.weight": f"{_GRANITE}.shared_mlp.input_linear.weight"
       for prefix in ("", "shared_") for name in ("gate", "up")},
    **{f"{prefix}down.weight": f"{_GRANITE}.shared_mlp.output_linear.weight" for prefix in ("", "shared_")},
}  # fmt: skip
"""With WeightNames.experts "stacked"."""


def parse_jamba_experts(raw: RawConfig) -> ExpertsConfig:
    """jamba/modeling_jamba.py:680."""
    require_silu(raw)
    num_experts = raw.count("num_experts", 16)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen(raw, num_experts, 2),
        intermediate_size=raw.count("intermediate_size"),
        kind="swiglu",
        router=RouterConfig(scoring="softmax_all"),
    )


def parse_granite_experts(raw: RawConfig) -> ExpertsConfig | MlpConfig:
    """granitemoehybrid/modeling_granitemoehybrid.py:879; without routed experts, the shared one alone."""
    require_silu(raw)
    shared = MlpConfig(intermediate_size=raw.count("shared_intermediate_size", 1024))
    num_experts = raw.whole("num_local_experts", 8)
    if num_experts == 0:
        return shared
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen(raw, num_experts, 2),
        intermediate_size=raw.count("intermediate_size"),
        kind="swiglu",
        router=RouterConfig(scoring="softmax_chosen"),
        shared=shared,
    )


def parse_nemotron_h_experts(raw: RawConfig) -> ExpertsConfig:
    """nemotron_h/modeling_nemotron_h.py:713."""
    activation = raw.get("mlp_hidden_act", "relu2")
    if activation != "relu2":
        raise raw.refuse(f"`mlp_hidden_act` {activation!r} is not supported in this family", "relu2")
    num_experts, bias = raw.count("n_routed_experts", 8), raw.flag("mlp_bias")
    chosen = num_chosen(raw, num_experts, 2)
    width = raw.count("moe_shared_expert_intermediate_size", 7688)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=chosen,
        intermediate_size=raw.count("moe_intermediate_size", 7688),
        kind="relu2",
        router=parse_sigmoid_router(raw, num_experts, chosen, scale=1.0, groups=(1, 1)),
        latent_size=None if raw.get("moe_latent_size") is None else raw.count("moe_latent_size"),
        latent_bias=bias,
        shared=MlpConfig(activation="relu2", intermediate_size=width, bias=bias, gated=False),
    )


def parse_sigmoid_router(
    raw: RawConfig, num_experts: int, chosen: int, *, scale: float, groups: tuple[int, int]
) -> RouterConfig:
    """Sigmoids, a correction bias, groups of experts (deepseek_v3/modeling_deepseek_v3.py:120).

    `scale` and `groups` (all, chosen) are the family's defaults.
    """
    num_groups, kept = raw.count("n_group", groups[0]), raw.count("topk_group", groups[1])
    size, rest = divmod(num_experts, num_groups)
    if rest or size < 2:
        raise CheckpointError(
            f"`n_group` {num_groups} does not divide {num_experts} experts into groups of two or more",
            where=raw.where,
        )
    if kept > num_groups or chosen > kept * size:
        raise CheckpointError(
            f"`topk_group` {kept} of `n_group` {num_groups} groups do not hold {chosen} experts to choose",
            where=raw.where,
        )
    return RouterConfig(
        scoring="sigmoid",
        wide=True,
        num_groups=num_groups,
        num_chosen_groups=kept,
        renormalise=raw.flag("norm_topk_prob", default=True),
        scale=raw.number("routed_scaling_factor", scale),
    )


def num_chosen(raw: RawConfig, num_experts: int, default: int) -> int:
    """`num_experts_per_tok`, checked."""
    chosen = raw.count("num_experts_per_tok", default)
    if chosen > num_experts:
        raise raw.refuse(f"`num_experts_per_tok` {chosen} is more than the {num_experts} experts")
    return chosen


def require_silu(raw: RawConfig) -> None:
    """Raise UnsupportedArchitecture for experts with another activation."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise raw.refuse(f"`hidden_act` {activation!r} is not supported in this family", "silu")
