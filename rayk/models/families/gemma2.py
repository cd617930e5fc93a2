"""Gemma 2: Gemma 3 without head norms, with one rope for all layers and soft caps on scores and logits."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig
from rayk.models.families import common, gemma3
from rayk.models.families.raw import RawConfig

# configuration_gemma2.py
DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def parse(raw: RawConfig) -> DecoderConfig:
    """Even layers slide without `layer_types`; a null cap means none."""
    config = gemma3.parse_gemma(raw, windows=common.periodic_windows(raw, period=2))
    return replace(config, attention_soft_cap=raw.optional_number("attn_logit_softcapping"))


FAMILY = common.Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(layer=gemma3.LAYER),
)
