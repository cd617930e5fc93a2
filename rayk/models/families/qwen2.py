"""Qwen2: llama with biases on q, k and v, and an optional window in the upper layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.families import common

if TYPE_CHECKING:
    from rayk.models.config import DecoderConfig
    from rayk.models.families.raw import RawConfig


def parse(raw: RawConfig) -> DecoderConfig:
    """The biases are not optional in this family, and o has none."""
    return common.parse_llama_like(raw, family="qwen2", windows=common.windows_by_layer(raw), qkv_bias=True)


TINY = {key: value for key, value in common.TINY_COMMON.items() if key != "head_dim"} | {"hidden_size": 128}

FAMILY = common.Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    parse=parse,
    weights=common.LLAMA_WEIGHTS,
    tiny=TINY,
)
