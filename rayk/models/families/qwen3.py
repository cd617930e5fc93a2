"""Qwen3: llama with RMSNorm on the heads of q and k, and an optional window in the upper layers."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig
from rayk.models.families import common
from rayk.models.families.raw import RawConfig


def parse(raw: RawConfig) -> DecoderConfig:
    """`attention_bias` puts a bias on q, k, v and o; head_dim defaults to 128."""
    config = common.parse_llama_like(
        raw, windows=common.upper_windows(raw), head_size=128, bias=raw.flag("attention_bias")
    )
    return replace(config, qk_norm=True)


FAMILY = common.Family(name="qwen3", architectures=("Qwen3ForCausalLM",), parse=parse)
