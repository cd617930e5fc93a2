"""Gemma 3: full and sliding layers with separate ropes, four norms of 1 + weight, heads of q and k normed.

`attn_logit_softcapping` is ignored: transformers stores it but never uses it (gemma3/modeling_gemma3.py:323).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rayk.models.config import DecoderConfig, MlpConfig, NormConfig, RopeConfig
from rayk.models.families import common
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope
from rayk.types.errors import CheckpointError

# What released checkpoints leave out (configuration_gemma3.py, Gemma3TextConfig).
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FULL_THETA, SLIDING_THETA = 1e6, 1e4


def parse(raw: RawConfig) -> DecoderConfig:
    windows = common.periodic_windows(raw, period=6)
    full, sliding = ropes_by_type(raw, raw.count("head_dim"))
    ropes = tuple(full if window is None else sliding for window in windows)
    return replace(parse_gemma(raw, windows=windows, ropes=ropes), qk_norm=True)


def parse_gemma(
    raw: RawConfig,
    *,
    windows: tuple[int | None, ...],
    ropes: tuple[RopeConfig | None, ...] | None = None,
) -> DecoderConfig:
    """Parse the settings that Gemma 2 and 3 share. The arguments are those of parse_llama_like."""
    require_causal(raw)
    config = common.parse_llama_like(
        raw,
        windows=windows,
        ropes=ropes,
        norm=NormConfig(eps=raw.number("rms_norm_eps", 1e-6), wide=True, offset=1.0),
        mlp=parse_mlp(raw),
        tied=True,
        bias=raw.flag("attention_bias"),
    )
    return replace(
        config,
        block="post_norms",
        query_scalar=raw.number("query_pre_attn_scalar"),
        embedding_scale=config.hidden_size**0.5,
        embedding_scale_rounded=True,
        final_soft_cap=raw.optional_number("final_logit_softcapping"),
    )


def parse_mlp(raw: RawConfig) -> MlpConfig:
    return common.parse_mlp(raw, key="hidden_activation", activation="gelu_pytorch_tanh")


def require_causal(raw: RawConfig) -> None:
    if raw.flag("use_bidirectional_attention"):
        raise raw.refuse("`use_bidirectional_attention` is not supported", "causal attention is")


def ropes_by_type(raw: RawConfig, head_size: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of full and of sliding layers. In the older form only the former are scaled."""
    new = raw.get("rope_parameters")
    if new is None:
        old = raw.get("rope_scaling", {})
        full: Any = {"rope_theta": raw.number("rope_theta", FULL_THETA)}
        full = full | old if isinstance(old, dict) else old
        sliding: Any = {"rope_theta": raw.number("rope_local_base_freq", SLIDING_THETA)}
    else:
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(new, dict) or not set(new) <= set(kinds):
            raise CheckpointError("`rope_parameters` must have an object per layer type", where=raw.where)
        full, sliding = (new.get(kind) or {} for kind in kinds)
    return (
        parse_rope(raw, head_size, values=full, theta=FULL_THETA),
        parse_rope(raw, head_size, values=sliding, theta=SLIDING_THETA),
    )


LAYER = MappingProxyType(
    {
        **common.LLAMA_LAYER,
        "post_mixer_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "mlp_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "post_mlp_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
    }
)

FAMILY = common.Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_types=("gemma3", "gemma3_text"),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(
        layer=LAYER,
        nested=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
    ),
)
