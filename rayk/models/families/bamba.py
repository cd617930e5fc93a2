"""Bamba: Mamba2 in most layers, attention with rope on half of each head in a few."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig
from rayk.models.families import common, hybrid
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope
from rayk.types.errors import CheckpointError

# configuration_bamba.py, which fixes the share of a head that rotates
DEFAULTS = {"max_position_embeddings": 262144, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}


def parse(raw: RawConfig) -> DecoderConfig:
    """Layers in `attn_layer_indices` attend, the others recur; each has a feed-forward half."""
    num_layers = raw.count("num_hidden_layers")
    head_size = raw.count("head_dim", common.default_head_size(raw))
    config = common.parse_llama_like(
        raw,
        num_kv_heads=hybrid.num_kv_heads(raw),
        ropes=(parse_rope(raw, head_size, partial=True),) * num_layers,
        mlp=common.parse_mlp(raw, bias=raw.flag("mlp_bias")),
        bias=raw.flag("attention_bias"),
    )
    attending = _attending(raw, num_layers)
    mixers = ["attention" if i in attending else "mamba2" for i in range(num_layers)]
    return replace(
        config,
        layers=hybrid.with_mixers(config, mixers),
        mamba2=hybrid.parse_mamba2(
            raw, inner=raw.count("mamba_expand") * config.hidden_size, norm_eps=config.norm.eps
        ),
    )


def _attending(raw: RawConfig, num_layers: int) -> frozenset[int]:
    found = raw.get("attn_layer_indices", [])
    if not isinstance(found, list) or not all(i in range(num_layers) for i in found):
        raise CheckpointError(
            f"`attn_layer_indices` must list some of layers 0 to {num_layers - 1}, not {found!r}",
            where=raw.where,
        )
    return frozenset(found)


FAMILY = common.Family(
    name="bamba",
    architectures=("BambaForCausalLM",),
    defaults={**hybrid.DEFAULTS, **DEFAULTS},
    parse=parse,
    weights=common.WeightNames(
        final_norm=hybrid.FINAL_NORM,
        layer={**hybrid.HYBRID_LAYER, **hybrid.mamba2_names("model.layers.{i}.mamba")},
    ),
)
