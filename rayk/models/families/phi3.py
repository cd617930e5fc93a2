"""Phi-3 and Phi-4 mini: fused projections, rope on part of each head, longrope.

longrope keeps two sets of factors and takes the long ones as soon as a sequence passes
`original_max_position_embeddings` (transformers/modeling_rope_utils.py:47). Keys that are cached by
then were turned with the short ones. So requests are served up to that length, where only the short
factors are in use, and longer ones are refused (`DecoderConfig.stated_positions`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.config import NormConfig
from rayk.models.families import common
from rayk.models.families.rope import parse_rope

if TYPE_CHECKING:
    from rayk.models.config import DecoderConfig
    from rayk.models.families.raw import RawConfig

DEFAULTS = {"original_max_position_embeddings": 4096}
OLD_LONGROPE_NAMES = ("su", "yarn")


def parse(raw: RawConfig) -> DecoderConfig:
    """Every layer slides when `sliding_window` is set, as in mistral."""
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
    """The rope settings, their kind as it is called today (configuration_phi3.py:97)."""
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
