"""Gemma 2: as Gemma 3 without head norms, one rope for all layers, and soft caps on scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rayk.models.families import common, gemma3

if TYPE_CHECKING:
    from rayk.models.config import DecoderConfig
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
    """Even layers slide where `layer_types` is absent; a cap that is null is none."""
    config = gemma3.parse_gemma(raw, windows=common.periodic_windows(raw, period=2))
    return replace(config, attention_soft_cap=raw.optional_number("attn_logit_softcapping"))


FAMILY = common.Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(layer=gemma3.LAYER),
)
