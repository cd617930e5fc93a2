"""Phi-3 and Phi-4 mini: fused projections, rope on part of each head, longrope.

longrope has two sets of factors and switches to the long ones once a sequence passes
`original_max_position_embeddings` (transformers/modeling_rope_utils.py:47). Keys cached by then were rotated
with the short ones. Requests are therefore served only up to that length (`DecoderConfig.stated_positions`).
"""

from __future__ import annotations

from rayk.models.config import DecoderConfig, NormConfig
from rayk.models.families import common
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope

DEFAULTS = {"original_max_position_embeddings": 4096}
OLD_LONGROPE_NAMES = ("su", "yarn")


def parse(raw: RawConfig) -> DecoderConfig:
    """Every layer slides if `sliding_window` is set, as in mistral."""
    windows = common.same_window(raw)
    rope = parse_rope(
        raw, raw.count("head_dim", common.default_head_size(raw)), values=_rope_values(raw), partial=True
    )
    return common.parse_llama_like(
        raw,
        windows=windows,
        num_kv_heads=raw.count("num_attention_heads"),
        ropes=(rope,) * len(windows),
        norm=NormConfig(eps=raw.number("rms_norm_eps", 1e-5)),
    )


def _rope_values(raw: RawConfig) -> object:
    """Return the rope settings, with today's name of their kind (configuration_phi3.py:97)."""
    found = raw.get("rope_parameters", raw.get("rope_scaling", {}))
    if not isinstance(found, dict):
        return found
    values: dict[str, object] = {"rope_theta": raw.number("rope_theta", 10000.0), **found}
    kind = values.get("rope_type", values.get("type"))
    return {**values, "rope_type": "longrope"} if kind in OLD_LONGROPE_NAMES else values


_FUSED = {
    "q.weight": "model.layers.{i}.self_attn.qkv_proj.weight",
    "k.weight": "model.layers.{i}.self_attn.qkv_proj.weight",
    "v.weight": "model.layers.{i}.self_attn.qkv_proj.weight",
    "gate.weight": "model.layers.{i}.mlp.gate_up_proj.weight",
    "up.weight": "model.layers.{i}.mlp.gate_up_proj.weight",
}

FAMILY = common.Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(layer={**common.LLAMA_LAYER, **_FUSED}),
)
