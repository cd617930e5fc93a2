"""Falcon-H1: Mamba2 and attention side by side in every layer, and a multiplier for every projection."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig, Mamba2Config, MlpConfig
from rayk.models.families import common, hybrid
from rayk.models.families.raw import RawConfig
from rayk.types.errors import CheckpointError

# configuration_falcon_h1.py
DEFAULTS = {
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


def parse(raw: RawConfig) -> DecoderConfig:
    """`mamba_d_ssm` is the inner width; null: `mamba_expand` x `hidden_size`."""
    config = common.parse_llama_like(
        raw,
        num_kv_heads=hybrid.num_kv_heads(raw),
        mlp=_mlp(raw),
        bias=raw.flag("attention_bias"),
    )
    return replace(
        config,
        layers=tuple(replace(layer, mixer="attention+mamba2") for layer in config.layers),
        mamba2=_mamba2(raw, config.norm.eps),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        logit_scale=raw.number("lm_head_multiplier", 1.0),
        key_multiplier=raw.number("key_multiplier", 1.0),
        attention_in_multiplier=raw.number("attention_in_multiplier", 1.0),
        attention_out_multiplier=raw.number("attention_out_multiplier", 1.0),
    )


def _mlp(raw: RawConfig) -> MlpConfig:
    gate, down = _multipliers(raw, "mlp_multipliers", 2)
    mlp = common.parse_mlp(raw, bias=raw.flag("mlp_bias"))
    return replace(mlp, gate_multiplier=gate, down_multiplier=down)


def _mamba2(raw: RawConfig, eps: float) -> Mamba2Config:
    inner = raw.count("mamba_d_ssm", raw.count("mamba_expand") * raw.count("hidden_size"))
    gate = "norm_gate" if raw.flag("mamba_norm_before_gate") else "gate_norm"
    z, x, b, c, dt = _multipliers(raw, "ssm_multipliers", 5)
    return replace(
        hybrid.parse_mamba2(
            raw, inner=inner, gate=gate if raw.flag("mamba_rms_norm") else "plain", norm_eps=eps
        ),
        out_bias=raw.flag("projectors_bias"),
        in_multiplier=raw.number("ssm_in_multiplier", 1.0),
        out_multiplier=raw.number("ssm_out_multiplier", 1.0),
        part_multipliers=(z, x, b, c, dt),
    )


def _multipliers(raw: RawConfig, key: str, count: int) -> tuple[float, ...]:
    found = raw.get(key, [1.0] * count)
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in found)
    ):
        raise CheckpointError(f"`{key}` must list {count} numbers, not {found!r}", where=raw.where)
    return tuple(float(n) for n in found)


FAMILY = common.Family(
    name="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    defaults={**hybrid.DEFAULTS, **DEFAULTS},
    parse=parse,
    weights=common.WeightNames(
        final_norm=hybrid.FINAL_NORM,
        layer={**hybrid.HYBRID_LAYER, **hybrid.mamba2_names("model.layers.{i}.mamba")},
    ),
)
