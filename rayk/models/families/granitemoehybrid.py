"""Granite 4: Mamba2 in most layers, attention in a few, experts beside a shared MLP, and multipliers."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from rayk.models.families import common, experts, hybrid
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope

if TYPE_CHECKING:
    from rayk.models.config import DecoderConfig, RopeConfig

# configuration_granitemoehybrid.py
DEFAULTS = {"max_position_embeddings": 2048}
_MIXERS = {hybrid.RECURRENT: "mamba2", hybrid.ATTENTION: "attention"}


def parse(raw: RawConfig) -> DecoderConfig:
    """`layer_types`, or all layers recur; positions only where `position_embedding_type` says rope."""
    raw = RawConfig({**hybrid.DEFAULTS, **DEFAULTS, **raw.values}, raw.where, raw.architecture)
    windows = common.no_windows(raw)
    keys = ("layer_types", "layers_block_type")
    kinds = hybrid.layer_kinds(raw, keys, len(windows)) or (hybrid.RECURRENT,) * len(windows)
    hybrid.require_kinds(raw, kinds, tuple(_MIXERS))
    bias = raw.flag("attention_bias")
    config = common.parse_llama_like(
        raw,
        family="granitemoehybrid",
        windows=windows,
        num_kv_heads=raw.count("num_attention_heads"),
        ropes=(_rope(raw),) * len(windows),
        mlp=experts.parse_granite_experts(raw),
    )
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        layers=hybrid.with_mixers(config, [_MIXERS[kind] for kind in kinds]),
        mamba2=hybrid.parse_mamba2(
            raw, inner=raw.count("mamba_expand") * config.hidden_size, norm_eps=config.norm.eps
        ),
        score_multiplier=raw.number("attention_multiplier", 1.0),
        residual_multiplier=raw.number("residual_multiplier", 1.0),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        logit_scale=1 / raw.number("logits_scaling", 1.0),
    )


def _rope(raw: RawConfig) -> RopeConfig | None:
    kind = raw.get("position_embedding_type")
    if kind is None or kind == "nope":
        return None
    if kind != "rope":
        raise raw.refuse(f"`position_embedding_type` {kind!r} is not supported", "rope, or null")
    return parse_rope(raw, raw.count("head_dim", common.default_head_size(raw)))


FAMILY = common.Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    parse=parse,
    weights=common.WeightNames(
        layer=MappingProxyType(
            {
                **common.LLAMA_LAYER,
                **hybrid.mamba2_names("model.layers.{i}.mamba"),
                **experts.GRANITE_NAMES,
            }
        ),
        experts="stacked",
    ),
)
