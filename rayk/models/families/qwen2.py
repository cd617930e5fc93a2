"""Qwen2: llama with biases on q, k and v, and an optional window in the upper layers."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig
from rayk.models.families import common
from rayk.models.families.raw import RawConfig


def parse(raw: RawConfig) -> DecoderConfig:
    """The biases are not optional, and o has none."""
    return replace(common.parse_llama_like(raw, windows=common.upper_windows(raw)), qkv_bias=True)


FAMILY = common.Family(name="qwen2", architectures=("Qwen2ForCausalLM",), parse=parse)
