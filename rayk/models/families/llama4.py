"""Llama 4 (text): chunked layers with rope, full ones without positions, experts weighted at their input.

`no_rope_layers` says which layers have rope and `layer_types` which attend in chunks; without the latter,
layers with rope are the chunked ones.
"""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import (
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    RouterConfig,
    TemperatureConfig,
)
from rayk.models.families import common, experts
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope
from rayk.types.errors import CheckpointError

# What transformers' class says where config.json is silent (configuration_llama4.py, Llama4TextConfig).
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
THETA = 500000.0
CHUNKED, FULL = "chunked_attention", "full_attention"


def parse(raw: RawConfig) -> DecoderConfig:
    num_layers = raw.count("num_hidden_layers")
    heads, head_size = raw.count("num_attention_heads"), raw.count("head_dim", common.default_head_size(raw))
    turning = _turning(raw, num_layers)
    rope = replace(parse_rope(raw, head_size, theta=THETA), pairing="interleaved", wide=True)
    eps = raw.number("rms_norm_eps")
    config = common.parse_llama_like(
        raw,
        head_size=head_size,
        num_kv_heads=heads,
        ropes=tuple(rope if turns else None for turns in turning),
        norm=NormConfig(eps=eps),
        mlp=replace(common.parse_mlp(raw), intermediate_size=raw.count("intermediate_size_mlp")),
        bias=raw.flag("attention_bias"),
    )
    return replace(
        config,
        layers=_layers(raw, config.layers),
        turned_norm_eps=eps if raw.flag("use_qk_norm") else None,
    )


def _layers(raw: RawConfig, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Add chunks, temperatures and experts."""
    chunks, temperature = _chunks(raw, layers), _temperature(raw)
    routed, routed_layers = _experts(raw), _routed_layers(raw, len(layers))
    return tuple(
        replace(
            layer,
            chunk=chunks[index],
            temperature=temperature if layer.rope is None else None,
            mlp=routed if index in routed_layers else layer.mlp,
        )
        for index, layer in enumerate(layers)
    )


def _turning(raw: RawConfig, num_layers: int) -> list[bool]:
    """Tell which layers have rope: those with 1 in `no_rope_layers`, or all but every
    `no_rope_layer_interval`-th."""
    interval = raw.count("no_rope_layer_interval")
    # Released checkpoints write an empty list.
    flags = raw.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise CheckpointError(
            f"`no_rope_layers` must say 1 (rotates) or 0 of {num_layers} layers (`num_hidden_layers`), "
            f"not {flags!r}",
            where=raw.where,
        )
    return [bool(flag) for flag in flags[:num_layers]]


def _chunks(raw: RawConfig, layers: tuple[LayerConfig, ...]) -> list[int | None]:
    """Read chunks of the layers that `layer_types` (or else rope) says attend in chunks."""
    kinds = raw.get("layer_types") or [FULL if layer.rope is None else CHUNKED for layer in layers]
    if not isinstance(kinds, list) or len(kinds) < len(layers):
        raise CheckpointError(
            f"`layer_types` must list {len(layers)} layers (`num_hidden_layers`)", where=raw.where
        )
    for index, kind in enumerate(kinds):
        if kind not in (CHUNKED, FULL):
            raise raw.refuse(f"`layer_types`[{index}] {kind!r} is not supported in this family")
    kinds = kinds[: len(layers)]
    chunk = None if raw.get("attention_chunk_size") is None else raw.count("attention_chunk_size")
    if chunk is None and CHUNKED in kinds:
        raise CheckpointError(
            f"`attention_chunk_size` is null, and layer {kinds.index(CHUNKED)} attends in chunks",
            where=raw.where,
            mend="give their size, or a `layer_types` in which every layer is full_attention",
        )
    return [chunk if kind == CHUNKED else None for kind in kinds]


def _temperature(raw: RawConfig) -> TemperatureConfig | None:
    """`attn_temperature_tuning` is true or false, or a number in the first checkpoints."""
    tuned = raw.get("attn_temperature_tuning")
    if not isinstance(tuned, int):
        raise CheckpointError(
            f"`attn_temperature_tuning` must be true or false, not {tuned!r}", where=raw.where
        )
    scale, floor = raw.number("attn_scale"), raw.count("floor_scale")
    return TemperatureConfig(scale=scale, floor=floor) if tuned else None


def _routed_layers(raw: RawConfig, num_layers: int) -> frozenset[int]:
    """`moe_layers`, or every `interleave_moe_layer_step`-th layer; the others are dense."""
    step = raw.count("interleave_moe_layer_step")
    listed = raw.get("moe_layers")
    if listed is None:
        listed = list(range(step - 1, num_layers, step))
    if not isinstance(listed, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in listed):
        raise CheckpointError(f"`moe_layers` must list layers, not {listed!r}", where=raw.where)
    for index in listed:
        # transformers ignores it silently; no released config.json has one, so it is a mistake.
        if not 0 <= index < num_layers:
            raise CheckpointError(
                f"`moe_layers` lists layer {index}, which is none of {num_layers} (`num_hidden_layers`)",
                where=raw.where,
                mend=f"layers are 0 to {num_layers - 1}",
            )
    return frozenset(listed)


def _experts(raw: RawConfig) -> ExpertsConfig:
    """The shared expert has a routed one's size (llama4/modeling_llama4.py:155)."""
    raw.require("hidden_act", "silu")
    num_experts, size = raw.count("num_local_experts"), raw.count("intermediate_size")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=experts.num_chosen(raw, num_experts, 1),
        intermediate_size=size,
        kind="swiglu",
        router=RouterConfig(scoring="sigmoid_chosen"),
        weighs_inputs=True,
        shared=MlpConfig(intermediate_size=size),
    )


_FEED_FORWARD = "model.layers.{i}.feed_forward"

FAMILY = common.Family(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    model_types=("llama4", "llama4_text"),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(
        layer={
            **common.LLAMA_LAYER,
            **{f"{part}.weight": f"{_FEED_FORWARD}.{part}_proj.weight" for part in ("gate", "up", "down")},
            **experts.shared_names(f"{_FEED_FORWARD}.shared_expert"),
            "router.weight": f"{_FEED_FORWARD}.router.weight",
            "experts_gate_up.weight": f"{_FEED_FORWARD}.experts.gate_up_proj",
            "experts_down.weight": f"{_FEED_FORWARD}.experts.down_proj",
        },
        nested=(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
        experts="halves",
    ),
)
