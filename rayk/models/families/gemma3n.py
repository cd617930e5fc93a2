"""Gemma 3n, the text model: several residual streams, per-layer embeddings, shared keys and values."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from rayk.models.config import AltUpConfig, DecoderConfig, MlpConfig, NormConfig
from rayk.models.families import common, gemma3
from rayk.models.families.raw import RawConfig
from rayk.models.families.sharing import COUNT, TARGETS
from rayk.types.errors import CheckpointError

# configuration_gemma3n.py, Gemma3nTextConfig.
DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_NUM_SPARSE, _SPARSITY = 10, 0.95
"""The first layers, and their sparsity, of a longer model without a pattern in config.json."""


def parse(raw: RawConfig) -> DecoderConfig:
    """Shared layers are parsed by families.sharing; only `num_kv_shared_layers` is accepted here."""
    if raw.get(TARGETS) is not None:
        raise raw.refuse(f"`{TARGETS}` is not supported in family {raw.family}", f"`{COUNT}` is")
    gemma3.require_causal(raw)
    windows = common.periodic_windows(raw, period=5)
    full, sliding = gemma3.ropes_by_type(raw, raw.count("head_dim"))
    mlps = _mlps(raw, len(windows))
    config = common.parse_llama_like(
        raw,
        windows=windows,
        ropes=tuple(full if window is None else sliding for window in windows),
        norm=NormConfig(eps=raw.number("rms_norm_eps"), wide=True),
        mlp=mlps[0],
        tied=True,
        bias=raw.flag("attention_bias"),
    )
    return replace(
        config,
        layers=tuple(replace(layer, mlp=mlp) for layer, mlp in zip(config.layers, mlps, strict=True)),
        block="post_norms",
        qk_norm=True,
        v_norm=True,
        score_multiplier=1.0,
        embedding_scale=config.hidden_size**0.5,
        embedding_scale_rounded=True,
        final_soft_cap=raw.optional_number("final_logit_softcapping"),
        altup=_altup(raw),
    )


def _altup(raw: RawConfig) -> AltUpConfig:
    num_streams, active = raw.count("altup_num_inputs"), raw.whole("altup_active_idx")
    if active >= num_streams:
        raise CheckpointError(
            f"`altup_active_idx` {active} is none of {num_streams} streams (`altup_num_inputs`)",
            where=raw.where,
        )
    return AltUpConfig(
        num_streams=num_streams,
        active_stream=active,
        scales_active=raw.flag("altup_correct_scale"),
        laurel_rank=raw.count("laurel_rank"),
        per_layer_size=raw.count("hidden_size_per_layer_input"),
        per_layer_vocab_size=raw.count("vocab_size_per_layer_input"),
    )


def _mlps(raw: RawConfig, num_layers: int) -> tuple[MlpConfig, ...]:
    """Return the feed-forward half of every layer; `intermediate_size` may be one number or a list."""
    sizes = raw.get("intermediate_size")
    if not isinstance(sizes, list):
        sizes = [sizes] * num_layers
    if len(sizes) != num_layers:
        raise CheckpointError(
            f"`intermediate_size` must be a number or list {num_layers} (`num_hidden_layers`), "
            f"not {len(sizes)}",
            where=raw.where,
        )
    return tuple(
        replace(
            gemma3.parse_mlp(raw.of({**raw.values, "intermediate_size": size})),
            sparsity=sparsity,
        )
        for size, sparsity in zip(sizes, _sparsities(raw, num_layers), strict=True)
    )


def _sparsities(raw: RawConfig, num_layers: int) -> list[float]:
    num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
    default = [_SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    found = raw.get("activation_sparsity_pattern", default)
    if not isinstance(found, list) or len(found) != num_layers:
        raise CheckpointError(
            f"`activation_sparsity_pattern` must list {num_layers} numbers (`num_hidden_layers`)",
            where=raw.where,
        )
    for value in found:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise CheckpointError(
                f"`activation_sparsity_pattern` must list shares from 0 to below 1, not {value!r}",
                where=raw.where,
            )
    return [float(value) for value in found]


LAYER = MappingProxyType(
    {
        **gemma3.LAYER,
        **{
            ours: f"model.layers.{{i}}.{stored}"
            for ours, stored in (
                ("altup_norm.weight", "altup.router_norm.weight"),
                ("altup_router.weight", "altup.modality_router.weight"),
                ("altup_predictor.weight", "altup.prediction_coefs.weight"),
                ("altup_corrector.weight", "altup.correction_coefs.weight"),
                ("laurel_left.weight", "laurel.linear_left.weight"),
                ("laurel_right.weight", "laurel.linear_right.weight"),
                ("laurel_norm.weight", "laurel.post_laurel_norm.weight"),
                ("per_layer_scale", "altup.correct_output_scale"),
                ("per_layer_gate.weight", "per_layer_input_gate.weight"),
                ("per_layer_out.weight", "per_layer_projection.weight"),
                ("per_layer_norm.weight", "post_per_layer_input_norm.weight"),
            )
        },
    }
)

FAMILY = common.Family(
    name="gemma3n",
    architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    model_types=("gemma3n", "gemma3n_text"),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(
        layer=LAYER,
        around={
            "spread": "model.altup_projections.{s}.weight",
            "merge": "model.altup_unembed_projections.{s}.weight",
            "per_layer_inputs": "model.embed_tokens_per_layer.weight",
            "per_layer_projection": "model.per_layer_model_projection.weight",
            "per_layer_norm": "model.per_layer_projection_norm.weight",
        },
        nested=(("model.language_model.", "model."),),
    ),
)
