"""Mistral: llama without biases; every layer slides if `sliding_window` is set."""

from __future__ import annotations

from rayk.models.config import DecoderConfig
from rayk.models.families import common
from rayk.models.families.raw import RawConfig


def parse(raw: RawConfig) -> DecoderConfig:
    return common.parse_llama_like(raw, windows=common.same_window(raw))


FAMILY = common.Family(name="mistral", architectures=("MistralForCausalLM",), parse=parse)
