"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig, ExpertsConfig, GdnConfig, MlpConfig, NormConfig, RouterConfig
from rayk.models.families import common, experts, hybrid
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope
from rayk.types.errors import CheckpointError

# configuration_qwen3_next.py
DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    # Its config class has no such key; released checkpoints have one layer, and vLLM assumes it.
    "num_nextn_predict_layers": 1,
}
_MIXERS = {hybrid.RECURRENT: "gdn", hybrid.ATTENTION: "attention"}


def parse(raw: RawConfig) -> DecoderConfig:
    """Without `layer_types`, every `full_attention_interval`-th layer attends and the others recur."""
    raw.require("hidden_act", "silu")
    kinds = _layer_kinds(raw)
    rope = parse_rope(raw, raw.count("head_dim"), partial=True)
    norm = NormConfig(eps=raw.number("rms_norm_eps", 1e-6), wide=True, offset=1.0)
    config = common.parse_llama_like(
        raw,
        ropes=(rope,) * len(kinds),
        norm=norm,
        bias=raw.flag("attention_bias"),
    )
    layers = hybrid.with_mixers(config, [_MIXERS[kind] for kind in kinds])
    mlps = experts.in_every_nth_layer(raw, _experts(raw))
    return replace(
        config,
        layers=tuple(replace(layer, mlp=mlp) for layer, mlp in zip(layers, mlps, strict=True)),
        # Its MTP layer attends, and has the feed-forward half that a layer 0 has.
        mtp_layers=(replace(config.layers[0], mlp=mlps[0]),) * raw.whole("num_nextn_predict_layers", 0),
        qk_norm=True,
        attention_gate=True,
        gdn=_gdn(raw, norm.eps),
    )


def _layer_kinds(raw: RawConfig) -> tuple[str, ...]:
    num_layers, interval = raw.count("num_hidden_layers"), raw.count("full_attention_interval")
    kinds = hybrid.layer_kinds(raw, ("layer_types",), num_layers) or tuple(
        hybrid.RECURRENT if (i + 1) % interval else hybrid.ATTENTION for i in range(num_layers)
    )
    hybrid.require_kinds(raw, kinds, tuple(_MIXERS))
    return kinds


def _gdn(raw: RawConfig, norm_eps: float) -> GdnConfig:
    num_key, num_value = raw.count("linear_num_key_heads"), raw.count("linear_num_value_heads")
    if num_value % num_key:
        raise CheckpointError(
            f"`linear_num_key_heads` {num_key} does not divide `linear_num_value_heads` {num_value}",
            where=raw.where,
        )
    return GdnConfig(
        num_key_heads=num_key,
        key_head_size=raw.count("linear_key_head_dim"),
        num_value_heads=num_value,
        value_head_size=raw.count("linear_value_head_dim"),
        conv_width=hybrid.conv_width(raw, "linear_conv_kernel_dim"),
        norm_eps=norm_eps,
    )


def _experts(raw: RawConfig) -> ExpertsConfig | None:
    num_experts = raw.whole("num_experts")
    if num_experts == 0:
        return None
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=experts.num_chosen(raw, num_experts, 10),
        intermediate_size=raw.count("moe_intermediate_size"),
        kind="swiglu",
        router=RouterConfig(scoring="softmax_all", renormalise=raw.flag("norm_topk_prob", default=True)),
        shared=MlpConfig(intermediate_size=raw.count("shared_expert_intermediate_size")),
        shared_gate=True,
    )


_GDN = {
    "gdn_qkvz.weight": "in_proj_qkvz.weight",
    "gdn_ba.weight": "in_proj_ba.weight",
    "gdn_conv.weight": "conv1d.weight",
    "gdn_A_log": "A_log",
    "gdn_dt_bias": "dt_bias",
    "gdn_norm.weight": "norm.weight",
    "gdn_out.weight": "out_proj.weight",
}
_MLP = "model.layers.{i}.mlp"
_LAYER = {
    **common.LLAMA_LAYER,
    **{ours: f"model.layers.{{i}}.linear_attn.{stored}" for ours, stored in _GDN.items()},
    **experts.single_names(_MLP, router="gate"),
    **experts.shared_names(f"{_MLP}.shared_expert"),
    "shared_sigmoid.weight": f"{_MLP}.shared_expert_gate.weight",
}
_MTP = {
    "embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
    "join.weight": "mtp.fc.weight",
    "output_norm.weight": "mtp.norm.weight",
}

FAMILY = common.Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(layer=_LAYER, experts="single"),
    mtp=common.MtpNames(
        weights=common.WeightNames(
            layer={name: stored.replace("model.", "mtp.", 1) for name, stored in _LAYER.items()} | _MTP,
            experts="single",
        ),
        numbered_on=False,
    ),
)
