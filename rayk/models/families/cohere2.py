"""Command R7B: attention and MLP side by side behind one LayerNorm, rope only in sliding layers."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig, NormConfig
from rayk.models.families import common
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope

# configuration_cohere2.py
DEFAULTS = {"sliding_window": 4096, "logit_scale": 0.0625}


def parse(raw: RawConfig) -> DecoderConfig:
    """Full layers have no positions (cohere2/modeling_cohere2.py:221); rope pairs are interleaved."""
    windows = common.periodic_windows(raw, period=4)
    head_size = raw.count("head_dim", common.default_head_size(raw))
    rope = replace(parse_rope(raw, head_size), pairing="interleaved")
    config = common.parse_llama_like(
        raw,
        windows=windows,
        head_size=head_size,
        num_kv_heads=raw.count("num_attention_heads"),
        ropes=tuple(None if window is None else rope for window in windows),
        norm=NormConfig(kind="layer", eps=raw.number("layer_norm_eps", 1e-5), wide=True),
        tied=True,
        bias=raw.flag("attention_bias"),
    )
    return replace(config, block="parallel", logit_scale=raw.number("logit_scale"))


FAMILY = common.Family(
    name="cohere2",
    architectures=("Cohere2ForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(layer={k: v for k, v in common.LLAMA_LAYER.items() if k != "mlp_norm.weight"}),
)
