"""Mistral: llama without biases; every layer slides when `sliding_window` is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.families import common

if TYPE_CHECKING:
    from rayk.models.config import DecoderConfig
    from rayk.models.families.raw import RawConfig


def parse(raw: RawConfig) -> DecoderConfig:
    """head_dim may differ from hidden / heads."""
    return common.parse_llama_like(raw, family="mistral", windows=common.same_window(raw))


# The window is no multiple of a block, so that its border falls inside one.
TINY = {**common.TINY_COMMON, "head_dim": 24, "sliding_window": 50}

FAMILY = common.Family(
    name="mistral",
    architecture="MistralForCausalLM",
    parse=parse,
    weights=common.LLAMA_WEIGHTS,
    tiny=TINY,
)
