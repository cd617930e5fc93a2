"""Llama: GQA, rope with optional scaling, optional biases, no window."""

from __future__ import annotations

from rayk.models.config import DecoderConfig
from rayk.models.families import common
from rayk.models.families.raw import RawConfig


def parse(raw: RawConfig) -> DecoderConfig:
    """`attention_bias` puts a bias on q, k, v and o, `mlp_bias` on gate, up and down."""
    return common.parse_llama_like(
        raw,
        # The first checkpoints, which have no GQA, do not write it.
        num_kv_heads=raw.count("num_attention_heads"),
        mlp=common.parse_mlp(raw, bias=raw.flag("mlp_bias")),
        bias=raw.flag("attention_bias"),
    )


FAMILY = common.Family(name="llama", architectures=("LlamaForCausalLM",), parse=parse)
