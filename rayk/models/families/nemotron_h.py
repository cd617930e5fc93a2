"""Nemotron-H: one half per layer: Mamba2, attention without positions, an MLP, or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rayk.models.config import DecoderConfig, ExpertsConfig, LayerConfig, Mamba2Config, MlpConfig, NormConfig
from rayk.models.families import common, experts, hybrid
from rayk.models.families.raw import RawConfig

# configuration_nemotron_h.py
DEFAULTS: Mapping[str, object] = {
    "conv_kernel": 4,
    "head_dim": 128,
    "intermediate_size": 21504,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "max_position_embeddings": 4096,
    "n_groups": 8,
    "ssm_state_size": 128,
    "use_conv_bias": True,
}
_OLD_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
}
_OLD_KEY = "hybrid_override_pattern"
_PATTERN = {"M": hybrid.RECURRENT, "*": hybrid.ATTENTION, "-": "mlp", "E": "moe"}
_DEFAULT_KINDS = (hybrid.RECURRENT, "moe", hybrid.ATTENTION, "mlp")
MAX_TIME_STEP_MIN = 1e-3
"""The value of released models."""


def parse(raw: RawConfig) -> DecoderConfig:
    """`layers_block_type`, or the older `hybrid_override_pattern`, names each layer's kind."""
    old = {_OLD_NAMES[key]: value for key, value in raw.values.items() if key in _OLD_NAMES}
    raw = raw.of({**raw.values, **old})
    kinds = _kinds(raw)
    eps = raw.number("layer_norm_epsilon", 1e-5)
    config = common.parse_llama_like(
        raw,
        windows=(None,) * len(kinds),
        num_kv_heads=hybrid.num_kv_heads(raw),
        ropes=(None,) * len(kinds),
        norm=NormConfig(eps=eps, wide=True),
        mlp=_mlp(raw),
    )
    halves = {
        hybrid.RECURRENT: LayerConfig(mixer="mamba2", rope=None, mlp=None),
        hybrid.ATTENTION: LayerConfig(rope=None, mlp=None),
        "mlp": LayerConfig(mixer="none", rope=None, mlp=_mlp(raw)),
    }
    if "moe" in kinds:
        halves["moe"] = LayerConfig(mixer="none", rope=None, mlp=parse_experts(raw))
    return replace(config, layers=tuple(halves[kind] for kind in kinds), mamba2=_mamba2(raw, eps))


def _kinds(raw: RawConfig) -> tuple[str, ...]:
    # Released files also have `num_hidden_layers`, which transformers ignores too.
    kinds = hybrid.layer_kinds(raw, ("layers_block_type", "layer_types"), None)
    if kinds is None and raw.get(_OLD_KEY) is not None:
        letters = [_PATTERN.get(letter, letter) for letter in str(raw.get(_OLD_KEY))]
        kinds = hybrid.layer_kinds(raw.of({_OLD_KEY: letters}), (_OLD_KEY,), None)
    kinds = kinds or _DEFAULT_KINDS
    hybrid.require_kinds(raw, kinds, tuple(_PATTERN.values()))
    return kinds


def _mlp(raw: RawConfig) -> MlpConfig:
    raw.require("mlp_hidden_act", "relu2")
    return MlpConfig(
        activation="relu2",
        intermediate_size=raw.count("intermediate_size"),
        bias=raw.flag("mlp_bias"),
        gated=False,
    )


def parse_experts(raw: RawConfig) -> ExpertsConfig:
    """Parse the experts of nemotron_h/modeling_nemotron_h.py:713."""
    raw.require("mlp_hidden_act", "relu2")
    num_experts, bias = raw.count("n_routed_experts", 8), raw.flag("mlp_bias")
    chosen = experts.num_chosen(raw, num_experts, 2)
    width = raw.count("moe_shared_expert_intermediate_size", 7688)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=chosen,
        intermediate_size=raw.count("moe_intermediate_size", 7688),
        kind="relu2",
        router=experts.parse_sigmoid_router(raw, num_experts, chosen, scale=1.0, groups=(1, 1)),
        latent_size=None if raw.get("moe_latent_size") is None else raw.count("moe_latent_size"),
        latent_bias=bias,
        shared=MlpConfig(activation="relu2", intermediate_size=width, bias=bias, gated=False),
    )


def _mamba2(raw: RawConfig, eps: float) -> Mamba2Config:
    """`time_step_limit` is unused (nemotron_h/modeling_nemotron_h.py:414)."""
    raw.require("mamba_hidden_act", *hybrid.SILU)
    if raw.number("time_step_min", MAX_TIME_STEP_MIN) > MAX_TIME_STEP_MIN:
        # transformers clamps steps to it in prefill but not in decode.
        raise raw.refuse(
            f"`time_step_min` {raw.get('time_step_min')} limits the time steps, which is not supported",
            f"at most {MAX_TIME_STEP_MIN}",
        )
    num_heads, bias = raw.count("mamba_num_heads"), raw.flag("use_bias")
    return Mamba2Config(
        num_heads=num_heads,
        head_size=raw.count("mamba_head_dim"),
        num_groups=hybrid.num_groups(raw, "n_groups", num_heads),
        state_size=raw.count("ssm_state_size"),
        conv_width=hybrid.conv_width(raw, "conv_kernel"),
        conv_bias=raw.flag("use_conv_bias"),
        proj_bias=bias,
        out_bias=bias,
        gate="gate_norm",
        norm_eps=eps,
    )


_LAYER = "backbone.layers.{i}"
_EXPERTS = {
    **experts.single_names("backbone.layers.{i}.mixer", router="gate", gated=False),
    **experts.shared_names("backbone.layers.{i}.mixer.shared_experts"),
    **{
        f"latent_{ours}.{part}": f"backbone.layers.{{i}}.mixer.{theirs}_latent_proj.{part}"
        for ours, theirs in (("down", "fc1"), ("up", "fc2"))
        for part in ("weight", "bias")
    },
}

FAMILY = common.Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(
        embedding="backbone.embeddings.weight",
        final_norm="backbone.norm_f.weight",
        layer={
            # A layer has one half and one norm.
            "input_norm.weight": f"{_LAYER}.norm.weight",
            "mlp_norm.weight": f"{_LAYER}.norm.weight",
            **hybrid.mamba2_names(f"{_LAYER}.mixer"),
            **hybrid.attention_names(f"{_LAYER}.mixer"),
            **hybrid.mlp_names(f"{_LAYER}.mixer"),
            **_EXPERTS,
        },
        experts="single",
    ),
)
