"""DeepSeek-V3: multi-head latent attention, and experts after the first few layers."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig, ExpertsConfig, LayerConfig, MlaConfig, MlpConfig, RopeConfig
from rayk.models.families import common, experts
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope, yarn_growth

# configuration_deepseek_v3.py
DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
# What released files say of routing and transformers does not read: it has this one way.
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def parse(raw: RawConfig) -> DecoderConfig:
    """Layers from `first_k_dense_replace` on have experts. `head_dim` (the rotated part's) is ignored."""
    for key, value in _ONLY.items():
        if raw.get(key, value) != value:
            raise raw.refuse(f"`{key}` {raw.get(key)!r} is not supported", f"{value!r}")
    raw = raw.of({k: v for k, v in raw.values.items() if k != "head_dim"})
    num_heads = raw.count("num_attention_heads")
    if raw.count("num_key_value_heads", num_heads) != num_heads:
        raise raw.refuse("`num_key_value_heads` unlike `num_attention_heads` is not supported in this family")
    rope_size = raw.count("qk_rope_head_dim")
    head_size = raw.count("qk_nope_head_dim") + rope_size
    rope = parse_rope(raw, rope_size)
    if raw.flag("rope_interleave", default=True):
        rope = replace(rope, pairing="interleaved")
    num_layers = raw.count("num_hidden_layers")
    dense = common.parse_mlp(raw)
    config = common.parse_llama_like(
        raw,
        head_size=head_size,
        num_kv_heads=num_heads,
        ropes=(rope,) * num_layers,
        mlp=dense,
    )
    num_dense = raw.whole("first_k_dense_replace")
    mlps: list[MlpConfig | ExpertsConfig] = [dense] * num_layers
    if num_dense < num_layers:
        mlps[num_dense:] = [_experts(raw)] * (num_layers - num_dense)
    layers = tuple(LayerConfig(mixer="mla", rope=rope, mlp=mlp) for mlp in mlps)
    # They are like the last layer (transformers/configuration_utils.py:1633).
    num_mtp = raw.whole("num_nextn_predict_layers", 0) if num_dense < num_layers else 0
    return replace(config, layers=layers, mtp_layers=layers[-1:] * num_mtp, mla=_mla(raw, rope, head_size))


def _mla(raw: RawConfig, rope: RopeConfig, head_size: int) -> MlaConfig:
    return MlaConfig(
        query_rank=None if raw.get("q_lora_rank") is None else raw.count("q_lora_rank"),
        latent_size=raw.count("kv_lora_rank"),
        nope_size=raw.count("qk_nope_head_dim"),
        rope_size=raw.count("qk_rope_head_dim"),
        value_size=raw.count("v_head_dim"),
        scale=head_size**-0.5 * _growth(raw, rope) ** 2,
        bias=raw.flag("attention_bias"),
    )


def _growth(raw: RawConfig, rope: RopeConfig) -> float:
    """Grow the scale as deepseek_v3/modeling_deepseek_v3.py:268 does."""
    settings = raw.of(raw.get("rope_parameters", raw.get("rope_scaling", {})))
    if rope.kind == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    return yarn_growth(rope.factor, settings.number("mscale_all_dim"))


def _experts(raw: RawConfig) -> ExpertsConfig:
    raw.require("hidden_act", "silu")
    num_experts = raw.count("n_routed_experts")
    chosen = experts.num_chosen(raw, num_experts, 8)
    inner = raw.count("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=chosen,
        intermediate_size=inner,
        kind="swiglu",
        router=experts.parse_sigmoid_router(raw, num_experts, chosen, scale=2.5, groups=(8, 4)),
        shared=MlpConfig(intermediate_size=inner * raw.count("n_shared_experts")),
    )


_ATTENTION = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
}
_MLP = "model.layers.{i}.mlp"
_LAYER = {
    **common.LLAMA_LAYER,
    **{
        f"{ours}.{part}": f"model.layers.{{i}}.self_attn.{stored}.{part}"
        for ours, stored in _ATTENTION.items()
        for part in ("weight", "bias")
    },
    **experts.single_names(_MLP, router="gate"),
    **experts.shared_names(f"{_MLP}.shared_experts"),
}
_MTP = {
    "embedding_norm.weight": "model.layers.{i}.enorm.weight",
    "hidden_norm.weight": "model.layers.{i}.hnorm.weight",
    "join.weight": "model.layers.{i}.eh_proj.weight",
    "output_norm.weight": "model.layers.{i}.shared_head.norm.weight",
}

FAMILY = common.Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    # Kimi K2's settings have another name.
    model_types=("deepseek_v3", "kimi_k2"),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(layer=_LAYER, experts="single"),
    mtp=common.MtpNames(weights=common.WeightNames(layer=_LAYER | _MTP, experts="single"), numbered_on=True),
)
