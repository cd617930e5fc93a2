"""gpt-oss: attention sinks, windows in every other layer, yarn, and experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig, ExpertsConfig, NormConfig
from rayk.models.families import common, experts
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope

# configuration_gpt_oss.py
DEFAULTS = {"head_dim": 64, "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
THETA = 150000.0


def parse(raw: RawConfig) -> DecoderConfig:
    """Even layers slide without `layer_types`. Router and experts always have biases."""
    windows = common.periodic_windows(raw, period=2)
    rope = parse_rope(raw, raw.count("head_dim"), theta=THETA)
    config = common.parse_llama_like(
        raw,
        windows=windows,
        ropes=(rope,) * len(windows),
        norm=NormConfig(eps=raw.number("rms_norm_eps", 1e-5), wide=True),
        mlp=_experts(raw),
        bias=raw.flag("attention_bias", default=True),
    )
    return replace(config, sinks=True)


def _experts(raw: RawConfig) -> ExpertsConfig:
    num_experts = raw.count("num_local_experts")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=experts.num_chosen(raw, num_experts, 4),
        intermediate_size=raw.count("intermediate_size"),
        alpha=raw.number("swiglu_alpha"),
        limit=raw.number("swiglu_limit"),
    )


_EXPERTS = {
    f"{name}.{part}": f"model.layers.{{i}}.mlp.{stored}"
    for name, part, stored in (
        ("router", "weight", "router.weight"),
        ("router", "bias", "router.bias"),
        ("experts_gate_up", "weight", "experts.gate_up_proj"),
        ("experts_gate_up", "bias", "experts.gate_up_proj_bias"),
        ("experts_down", "weight", "experts.down_proj"),
        ("experts_down", "bias", "experts.down_proj_bias"),
    )
}

FAMILY = common.Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(
        layer={**common.LLAMA_LAYER, **_EXPERTS, "sinks": "model.layers.{i}.self_attn.sinks"}
    ),
)
