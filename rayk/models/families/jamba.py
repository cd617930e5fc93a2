"""Jamba: Mamba1 in most layers, attention without positions in some, experts in every other."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from rayk.models.config import DecoderConfig, ExpertsConfig, Mamba1Config, RouterConfig
from rayk.models.families import common, experts, hybrid
from rayk.models.families.raw import RawConfig
from rayk.types.errors import CheckpointError

# configuration_jamba.py
DEFAULTS = {
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": "auto",
    "mamba_expand": 2,
    "max_position_embeddings": 262144,
    "num_experts": 16,
}


def parse(raw: RawConfig) -> DecoderConfig:
    """Layer i attends if i % `attn_layer_period` is `attn_layer_offset`; likewise for experts."""
    num_layers = raw.count("num_hidden_layers")
    config = common.parse_llama_like(
        raw,
        num_kv_heads=hybrid.num_kv_heads(raw),
        ropes=(None,) * num_layers,
    )
    attending = _periodic(raw, "attn", num_layers)
    layers = hybrid.with_mixers(config, ["attention" if yes else "mamba1" for yes in attending])
    # One expert would be a plain feed-forward half (jamba/modeling_jamba.py:735).
    if raw.count("num_experts") > 1:
        routed = parse_experts(raw)
        layers = tuple(
            replace(layer, mlp=routed) if yes else layer
            for layer, yes in zip(layers, _periodic(raw, "expert", num_layers), strict=True)
        )
    return replace(config, layers=layers, mamba1=_mamba1(raw, config.norm.eps))


def _periodic(raw: RawConfig, what: str, num_layers: int) -> list[bool]:
    period, offset = raw.count(f"{what}_layer_period"), raw.whole(f"{what}_layer_offset")
    if offset >= period:
        raise CheckpointError(
            f"`{what}_layer_offset` {offset} must be below `{what}_layer_period` {period}", where=raw.where
        )
    return [i % period == offset for i in range(num_layers)]


def parse_experts(raw: RawConfig) -> ExpertsConfig:
    """Parse the experts of jamba/modeling_jamba.py:680."""
    raw.require("hidden_act", "silu")
    num_experts = raw.count("num_experts", 16)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=experts.num_chosen(raw, num_experts, 2),
        intermediate_size=raw.count("intermediate_size"),
        kind="swiglu",
        router=RouterConfig(scoring="softmax_all"),
    )


def _mamba1(raw: RawConfig, norm_eps: float) -> Mamba1Config:
    raw.require("hidden_act", *hybrid.SILU)
    hidden_size = raw.count("hidden_size")
    is_auto = raw.get("mamba_dt_rank") == "auto"
    return Mamba1Config(
        num_channels=raw.count("mamba_expand") * hidden_size,
        state_size=raw.count("mamba_d_state"),
        conv_width=hybrid.conv_width(raw, "mamba_d_conv"),
        dt_rank=ceil(hidden_size / 16) if is_auto else raw.count("mamba_dt_rank"),
        conv_bias=raw.flag("mamba_conv_bias"),
        proj_bias=raw.flag("mamba_proj_bias"),
        inner_norm_eps=norm_eps,
    )


FAMILY = common.Family(
    name="jamba",
    architectures=("JambaForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(
        final_norm=hybrid.FINAL_NORM,
        layer={
            **hybrid.HYBRID_LAYER,
            **hybrid.mamba1_names("model.layers.{i}.mamba"),
            **experts.single_names("model.layers.{i}.feed_forward", router="router"),
        },
        experts="single",
    ),
)
