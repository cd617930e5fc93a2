"""Llama: GQA, rope with optional llama3 scaling, optional biases, no window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.families import common

if TYPE_CHECKING:
    from rayk.models.config import DecoderConfig
    from rayk.models.families.raw import RawConfig


def parse(raw: RawConfig) -> DecoderConfig:
    """`attention_bias` puts a bias on q, k, v and o, `mlp_bias` on gate, up and down."""
    bias = raw.flag("attention_bias")
    return common.parse_llama_like(
        raw,
        family="llama",
        windows=common.no_windows(raw),
        # The first checkpoints, which have no GQA, do not write it.
        num_kv_heads=raw.count("num_attention_heads"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.flag("mlp_bias"),
    )


TINY = {
    **common.TINY_COMMON,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}

FAMILY = common.Family(
    name="llama",
    architecture="LlamaForCausalLM",
    parse=parse,
    weights=common.LLAMA_WEIGHTS,
    tiny=TINY,
)
