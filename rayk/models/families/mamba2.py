"""Mamba2: recurrent layers only, without feed-forward halves; the residual stream is float32."""

from __future__ import annotations

from collections.abc import Mapping

from rayk.models.config import DecoderConfig, LayerConfig, Mamba2Config, NormConfig
from rayk.models.families import common, hybrid
from rayk.models.families.raw import RawConfig
from rayk.types.errors import CheckpointError

# configuration_mamba2.py
DEFAULTS: Mapping[str, object] = {
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_size": 4096,
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "residual_in_fp32": True,
    "state_size": 128,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 32768,
}
MAX_POSITIONS = 1 << 20
"""Positions served if config.json names no limit; the model has none."""


def parse(raw: RawConfig) -> DecoderConfig:
    eps = raw.number("layer_norm_epsilon", 1e-5)
    layer = LayerConfig(mixer="mamba2", rope=None, mlp=None)
    num_layers = raw.count("num_hidden_layers")
    return DecoderConfig(
        architecture=raw.architecture,
        family=raw.family,
        hidden_size=raw.count("hidden_size"),
        num_layers=num_layers,
        num_query_heads=0,
        num_kv_heads=0,
        head_size=0,
        vocab_size=raw.count("vocab_size"),
        max_positions=raw.count("max_position_embeddings", MAX_POSITIONS),
        norm=NormConfig(eps=eps),
        tie_embeddings=raw.flag("tie_word_embeddings"),
        dtype=common.parse_dtype(raw),
        layers=(layer,) * num_layers,
        residual_wide=raw.flag("residual_in_fp32"),
        mamba2=_mamba2(raw, eps),
        bos_token_id=raw.token_id("bos_token_id"),
        eos_token_ids=raw.token_ids("eos_token_id"),
        pad_token_id=raw.token_id("pad_token_id"),
    )


def _mamba2(raw: RawConfig, eps: float) -> Mamba2Config:
    num_heads, head_size = raw.count("num_heads"), raw.count("head_dim")
    inner = int(raw.count("hidden_size") * raw.number("expand"))
    if num_heads * head_size != inner:
        raise CheckpointError(
            f"`num_heads` {num_heads} x `head_dim` {head_size} is not `hidden_size` x `expand`, {inner}",
            where=raw.where,
        )
    hybrid.refuse_time_steps(raw)
    raw.require("hidden_act", *hybrid.SILU)
    bias = raw.flag("use_bias")
    return Mamba2Config(
        num_heads=num_heads,
        head_size=head_size,
        num_groups=hybrid.num_groups(raw, "n_groups", num_heads),
        state_size=raw.count("state_size"),
        conv_width=hybrid.conv_width(raw, "conv_kernel"),
        conv_bias=raw.flag("use_conv_bias"),
        proj_bias=bias,
        out_bias=bias,
        gate="gate_norm",
        norm_eps=eps,
    )


FAMILY = common.Family(
    name="mamba2",
    architectures=("Mamba2ForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(
        embedding="backbone.embeddings.weight",
        final_norm="backbone.norm_f.weight",
        layer={
            "input_norm.weight": "backbone.layers.{i}.norm.weight",
            **hybrid.mamba2_names("backbone.layers.{i}.mixer"),
        },
        # mamba2/modeling_mamba2.py:745
        nested=(("backbone.embedding.", "backbone.embeddings."),),
    ),
)
