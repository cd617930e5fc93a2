"""Mistral: llama without biases; every layer slides when `sliding_window` is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.families import common

if TYPE_CHECKING:
    from rayk.models.config import DecoderConfig
    from rayk.models.families.raw import RawConfig


def parse(raw: RawConfig) -> DecoderConfig:
    """head_dim may differ from hidden / heads."""
    return common.parse_llama_like(raw, windows=common.same_window(raw))


FAMILY = common.Family(name="mistral", architectures=("MistralForCausalLM",), parse=parse)
