"""Settings and weight names of routed experts.

For families that store one tensor per expert (WeightNames.experts "single") or stack all experts' rows
("stacked"). gpt_oss has a form of its own.
"""

from __future__ import annotations

from rayk.models.config import ExpertsConfig, MlpConfig, RouterConfig
from rayk.models.families import common
from rayk.models.families.raw import RawConfig
from rayk.types.errors import CheckpointError


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
    chosen = raw.count("num_experts_per_tok", default)
    if chosen > num_experts:
        raise raw.refuse(f"`num_experts_per_tok` {chosen} is more than the {num_experts} experts")
    return chosen


def in_every_nth_layer(raw: RawConfig, routed: ExpertsConfig | None) -> list[MlpConfig | ExpertsConfig]:
    """Put experts into every `decoder_sparse_step`-th layer except `mlp_only_layers`, and a dense MLP into
    the others (qwen3_moe/modeling_qwen3_moe.py:308). Without experts every layer is dense."""
    num_layers, step = raw.count("num_hidden_layers"), raw.count("decoder_sparse_step", 1)
    dense, left_out = common.parse_mlp(raw), raw.get("mlp_only_layers", [])
    if not isinstance(left_out, list) or len(left_out) > num_layers:
        raise CheckpointError(f"`mlp_only_layers` must list layers, not {left_out!r}", where=raw.where)
    return [dense if routed is None or i in left_out or (i + 1) % step else routed for i in range(num_layers)]
