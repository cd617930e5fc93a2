"""Granite 4: Mamba2 in most layers, attention in a few, experts beside a shared MLP, and multipliers."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig, ExpertsConfig, MlpConfig, RopeConfig, RouterConfig
from rayk.models.families import common, experts, hybrid
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope

# configuration_granitemoehybrid.py
DEFAULTS = {"max_position_embeddings": 2048}
_MIXERS = {hybrid.RECURRENT: "mamba2", hybrid.ATTENTION: "attention"}


def parse(raw: RawConfig) -> DecoderConfig:
    """All layers recur without `layer_types`; positions only if `position_embedding_type` is rope."""
    num_layers = raw.count("num_hidden_layers")
    keys = ("layer_types", "layers_block_type")
    kinds = hybrid.layer_kinds(raw, keys, num_layers) or (hybrid.RECURRENT,) * num_layers
    hybrid.require_kinds(raw, kinds, tuple(_MIXERS))
    config = common.parse_llama_like(
        raw,
        num_kv_heads=raw.count("num_attention_heads"),
        ropes=(_rope(raw),) * num_layers,
        mlp=parse_experts(raw),
        bias=raw.flag("attention_bias"),
    )
    return replace(
        config,
        layers=hybrid.with_mixers(config, [_MIXERS[kind] for kind in kinds]),
        mamba2=hybrid.parse_mamba2(
            raw, inner=raw.count("mamba_expand") * config.hidden_size, norm_eps=config.norm.eps
        ),
        score_multiplier=raw.number("attention_multiplier", 1.0),
        residual_multiplier=raw.number("residual_multiplier", 1.0),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        logit_scale=1 / raw.number("logits_scaling", 1.0),
    )


def parse_experts(raw: RawConfig) -> ExpertsConfig | MlpConfig:
    """Parse routed experts (granitemoehybrid/modeling_granitemoehybrid.py:879), or the shared MLP alone."""
    raw.require("hidden_act", "silu")
    shared = MlpConfig(intermediate_size=raw.count("shared_intermediate_size", 1024))
    num_experts = raw.whole("num_local_experts", 8)
    if num_experts == 0:
        return shared
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=experts.num_chosen(raw, num_experts, 2),
        intermediate_size=raw.count("intermediate_size"),
        kind="swiglu",
        router=RouterConfig(scoring="softmax_chosen"),
        shared=shared,
    )


def _rope(raw: RawConfig) -> RopeConfig | None:
    kind = raw.get("position_embedding_type")
    if kind is None or kind == "nope":
        return None
    if kind != "rope":
        raise raw.refuse(f"`position_embedding_type` {kind!r} is not supported", "rope, or null")
    return parse_rope(raw, raw.count("head_dim", common.default_head_size(raw)))


_LAYER = "model.layers.{i}"
_EXPERTS = {
    "router.weight": f"{_LAYER}.block_sparse_moe.router.layer.weight",
    "experts_gate_up.weight": f"{_LAYER}.block_sparse_moe.input_linear.weight",
    "experts_down.weight": f"{_LAYER}.block_sparse_moe.output_linear.weight",
    # The shared expert, and the whole feed-forward half of models without routed ones.
    **{f"{prefix}{name}.weight": f"{_LAYER}.shared_mlp.input_linear.weight"
       for prefix in ("", "shared_") for name in ("gate", "up")},
    **{f"{prefix}down.weight": f"{_LAYER}.shared_mlp.output_linear.weight" for prefix in ("", "shared_")},
}  # fmt: skip

FAMILY = common.Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    defaults={**hybrid.DEFAULTS, **DEFAULTS},
    parse=parse,
    weights=common.WeightNames(
        layer={
            **common.LLAMA_LAYER,
            **hybrid.mamba2_names("model.layers.{i}.mamba"),
            **_EXPERTS,
        },
        experts="stacked",
    ),
)
