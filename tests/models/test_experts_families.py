"""config.json of deepseek_v3, of Qwen with experts, and of others, against transformers' reading of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from rayk.kv.specs import GatedDeltaNetSpec, MlaSpec
from rayk.models.config import (
    DecoderConfig,
    ExpertsConfig,
    GdnConfig,
    MlaConfig,
    MlpConfig,
    NormConfig,
    RopeConfig,
    RouterConfig,
)
from rayk.models.families import granitemoehybrid, jamba, nemotron_h, parse_config
from rayk.models.families.raw import RawConfig
from rayk.models.kv_specs import kv_cache_specs
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.models.released_experts import DEEPSEEK_V3, QWEN3_235B, QWEN3_NEXT_80B
from tests.models.test_families import in_new_form

PLAIN_DEEPSEEK = {k: v for k, v in DEEPSEEK_V3.items() if k != "quantization_config"}


def experts_of(config: DecoderConfig, layer: int) -> ExpertsConfig:
    mlp = config.layers[layer].mlp
    assert isinstance(mlp, ExpertsConfig)
    return mlp


def test_deepseek_v3() -> None:
    config = parse_config(PLAIN_DEEPSEEK)
    quantised = parse_config(DEEPSEEK_V3)
    assert quantised.quantisation is not None
    assert quantised.quantisation.text == "fp8, blocks of 128 x 128"
    assert replace(quantised, quantisation=None) == config
    assert parse_config(in_new_form(PLAIN_DEEPSEEK)) == config
    growth = 0.1 * math.log(40) + 1
    assert config.mla == MlaConfig(
        query_rank=1536,
        latent_size=512,
        nope_size=128,
        rope_size=64,
        value_size=128,
        scale=192**-0.5 * growth**2,
    )
    theirs = transformers.DeepseekV3Config(**PLAIN_DEEPSEEK)
    assert config.mla.scale == pytest.approx(yarn_apply_mscale(theirs.rope_parameters, 192**-0.5), rel=1e-12)
    assert config.layers[0].rope == RopeConfig(
        kind="yarn",
        theta=1e4,
        rotary_size=64,
        pairing="interleaved",
        factor=40.0,
        original_max_positions=4096,
        attention_factor=1.0,
    )
    assert {layer.mixer for layer in config.layers} == {"mla"}
    assert [isinstance(layer.mlp, ExpertsConfig) for layer in config.layers] == [False] * 3 + [True] * 58
    assert config.layers[0].mlp == MlpConfig(intermediate_size=18432)
    assert experts_of(config, 3) == ExpertsConfig(
        num_experts=256,
        num_chosen=8,
        intermediate_size=2048,
        kind="swiglu",
        router=RouterConfig(
            scoring="sigmoid", wide=True, num_groups=8, num_chosen_groups=4, renormalise=True, scale=2.5
        ),
        shared=MlpConfig(intermediate_size=2048),
    )
    spec = kv_cache_specs(config, block_size=16, dtype="bfloat16")[60, "attention"]
    assert spec == MlaSpec(16, 512, 64, "bfloat16", 128)
    assert why_tp_unsupported(config, 128) is None
    assert why_tp_unsupported(config, 3) == "TP 3 does not divide the model's 128 query heads"


def test_qwen3_next_80b() -> None:
    config = parse_config(QWEN3_NEXT_80B)
    assert parse_config(in_new_form(QWEN3_NEXT_80B)) == config
    assert [layer.mixer for layer in config.layers] == ["gdn", "gdn", "gdn", "attention"] * 12
    rope = RopeConfig(kind="default", theta=1e7, rotary_size=64)
    assert [layer.rope for layer in config.layers] == [None, None, None, rope] * 12
    assert config.norm == NormConfig(eps=1e-6, wide=True, offset=1.0)
    assert config.gdn == GdnConfig(
        num_key_heads=16,
        key_head_size=128,
        num_value_heads=32,
        value_head_size=128,
        conv_width=4,
        norm_eps=1e-6,
    )
    assert (config.attention_gate, config.qk_norm, config.qkv_bias, config.o_bias) == (
        True,
        True,
        False,
        False,
    )
    assert {layer.mlp for layer in config.layers} == {
        ExpertsConfig(
            num_experts=512,
            num_chosen=10,
            intermediate_size=512,
            kind="swiglu",
            router=RouterConfig(scoring="softmax_all", renormalise=True),
            shared=MlpConfig(intermediate_size=512),
            shared_gate=True,
        )
    }
    specs = kv_cache_specs(config, block_size=16, dtype="bfloat16")
    assert specs[0, "state"] == GatedDeltaNetSpec(262144, "bfloat16", 4, 16, 128, 32, 128)
    assert why_tp_unsupported(config, 16) is None
    assert why_tp_unsupported(config, 64) == "TP 64 does not divide the model's 32 value heads"


def test_qwen3_235b() -> None:
    config = parse_config(QWEN3_235B)
    assert parse_config(in_new_form(QWEN3_235B)) == config
    assert (config.num_layers, config.num_query_heads, config.num_kv_heads) == (94, 64, 4)
    assert (config.head_size, config.qk_norm, config.qkv_bias, config.o_bias) == (128, True, False, False)
    assert {(layer.mixer, layer.window, layer.rope) for layer in config.layers} == {
        ("attention", None, RopeConfig(kind="default", theta=1e6, rotary_size=128))
    }
    assert {layer.mlp for layer in config.layers} == {
        ExpertsConfig(
            num_experts=128,
            num_chosen=8,
            intermediate_size=1536,
            kind="swiglu",
            router=RouterConfig(scoring="softmax_all", renormalise=True),
        )
    }
    assert why_tp_unsupported(config, 8) is None


def test_qwen3_moe_without_keys_is_transformers_defaults() -> None:
    """Its class has no head_dim; with windows on, all layers slide, whatever `max_window_layers` says."""
    theirs = transformers.Qwen3MoeConfig(use_sliding_window=True, max_window_layers=9)
    raw = {
        key: getattr(theirs, key)
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "use_sliding_window",
        )
    }
    raw |= {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 32768}
    raw |= {"architectures": ["Qwen3MoeForCausalLM"], "max_window_layers": 9}
    config = parse_config(raw)
    assert config == parse_config(theirs.to_dict() | {"architectures": raw["architectures"]})
    assert config.head_size == 64
    assert {layer.window for layer in config.layers} == {theirs.sliding_window}
    own = experts_of(config, 0)
    assert (own.num_experts, own.num_chosen) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert own.intermediate_size == theirs.moe_intermediate_size
    assert own.router.renormalise == theirs.norm_topk_prob


def test_the_two_names_of_the_number_of_experts_must_agree() -> None:
    both = QWEN3_235B | {"num_local_experts": 128}
    assert parse_config(both) == parse_config(QWEN3_235B)
    with pytest.raises(CheckpointError, match="`num_experts` and `num_local_experts` differ"):
        parse_config(both | {"num_local_experts": 64})


@pytest.mark.parametrize("whole", [QWEN3_NEXT_80B, QWEN3_235B], ids=["qwen3_next", "qwen3_moe"])
@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [0, 3]}, [0, 3]),
        ({"decoder_sparse_step": 2}, [0, 2, 4]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3, 4]),
        ({"num_experts": 0}, [0, 1, 2, 3, 4, 5]),
        ({"mlp_only_layers": None}, []),
    ],
)
def test_which_layers_are_dense(whole: dict[str, Any], changes: dict[str, Any], dense: list[int]) -> None:
    raw = whole | {"num_hidden_layers": 6} | changes
    config = parse_config(raw)
    assert [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MlpConfig)] == dense


def test_kinds_of_layers_of_qwen3_next() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    raw = QWEN3_NEXT_80B | {"num_hidden_layers": 3, "layer_types": kinds}
    assert [layer.mixer for layer in parse_config(raw).layers] == ["attention", "gdn", "gdn"]
    raw = QWEN3_NEXT_80B | {"num_hidden_layers": 5, "full_attention_interval": 2}
    assert parse_config(raw).state_layers == (0, 2, 4)


@pytest.mark.parametrize("num_dense", [0, 2, 99])
def test_first_dense_layers_of_deepseek_v3(num_dense: int) -> None:
    raw = PLAIN_DEEPSEEK | {"num_hidden_layers": 4, "first_k_dense_replace": num_dense}
    kinds = [isinstance(layer.mlp, MlpConfig) for layer in parse_config(raw).layers]
    assert kinds == [i < num_dense for i in range(4)]


def test_deepseek_v3_where_config_json_is_silent() -> None:
    """What transformers' class says; its `head_dim` is the rotated part's."""
    left = ("rope_scaling", "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor")
    raw = {k: v for k, v in PLAIN_DEEPSEEK.items() if k not in left} | {"q_lora_rank": None, "head_dim": 64}
    config = parse_config(raw)
    assert config.mla is not None
    assert (config.mla.query_rank, config.mla.scale, config.head_size) == (None, 192**-0.5, 192)
    theirs = transformers.DeepseekV3Config(**raw)
    router = experts_of(config, theirs.first_k_dense_replace).router
    assert (router.num_groups, router.num_chosen_groups) == (theirs.n_group, theirs.topk_group)
    assert router.scale == theirs.routed_scaling_factor
    halves = parse_config(raw | {"rope_interleave": False})
    assert halves.layers[0].rope == RopeConfig(kind="default", theta=1e4, rotary_size=64)


@pytest.mark.parametrize(
    ("raw", "changes", "error", "match"),
    [
        (PLAIN_DEEPSEEK, {"n_group": 7}, CheckpointError, "does not divide 256 experts"),
        (PLAIN_DEEPSEEK, {"n_group": 256}, CheckpointError, "into groups of two or more"),
        (PLAIN_DEEPSEEK, {"n_group": 64, "topk_group": 1}, CheckpointError, "do not hold 8 experts"),
        (PLAIN_DEEPSEEK, {"topk_group": 9}, CheckpointError, "`topk_group` 9 of `n_group` 8"),
        (PLAIN_DEEPSEEK, {"num_experts_per_tok": 257}, UnsupportedArchitecture, "257 is more than"),
        (PLAIN_DEEPSEEK, {"scoring_func": "softmax"}, UnsupportedArchitecture, "`scoring_func` 'softmax'"),
        (PLAIN_DEEPSEEK, {"topk_method": "greedy"}, UnsupportedArchitecture, "`topk_method` 'greedy'"),
        (PLAIN_DEEPSEEK, {"moe_layer_freq": 2}, UnsupportedArchitecture, "`moe_layer_freq` 2"),
        (PLAIN_DEEPSEEK, {"num_key_value_heads": 8}, UnsupportedArchitecture, "`num_key_value_heads` unlike"),
        (PLAIN_DEEPSEEK, {"first_k_dense_replace": -1}, CheckpointError, "`first_k_dense_replace`"),
        (PLAIN_DEEPSEEK, {"hidden_act": "gelu_pytorch_tanh"}, UnsupportedArchitecture, "`hidden_act`"),
        (PLAIN_DEEPSEEK, {"qk_rope_head_dim": 7}, CheckpointError, "cannot rotate"),
        (QWEN3_NEXT_80B, {"linear_num_key_heads": 5}, CheckpointError, "5 does not divide"),
        (QWEN3_NEXT_80B, {"layer_types": ["full_attention"]}, CheckpointError, "must list 48 layers"),
        (QWEN3_NEXT_80B, {"layer_types": ["moe"] * 48}, UnsupportedArchitecture, "'moe'"),
        (QWEN3_NEXT_80B, {"mlp_only_layers": 3}, CheckpointError, "`mlp_only_layers` must list"),
        (QWEN3_NEXT_80B, {"hidden_act": "gelu_pytorch_tanh"}, UnsupportedArchitecture, "`hidden_act`"),
        (QWEN3_NEXT_80B, {"num_experts_per_tok": 513}, UnsupportedArchitecture, "513 is more than"),
        (QWEN3_NEXT_80B, {"linear_conv_kernel_dim": 1}, UnsupportedArchitecture, "sees one token"),
    ],
)
def test_refusals(raw: dict[str, Any], changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        parse_config(raw | changes)


def raw_of(**values: Any) -> RawConfig:
    return RawConfig({"intermediate_size": 20, **values}, "config.json")


def test_experts_of_granite() -> None:
    """Without routed experts the shared one is the whole half."""
    shared = MlpConfig(intermediate_size=27)
    assert granitemoehybrid.parse_experts(raw_of(num_local_experts=0, shared_intermediate_size=27)) == shared
    routed = granitemoehybrid.parse_experts(raw_of(num_local_experts=6, shared_intermediate_size=27))
    assert isinstance(routed, ExpertsConfig)
    assert (routed.num_experts, routed.num_chosen, routed.intermediate_size) == (6, 2, 20)
    assert (routed.router, routed.shared) == (RouterConfig(), shared)


def test_experts_of_nemotron_h() -> None:
    values = {"n_routed_experts": 6, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 9}
    routed = nemotron_h.parse_experts(raw_of(**values, moe_latent_size=5, mlp_bias=True))
    assert (routed.kind, routed.latent_size, routed.latent_bias) == ("relu2", 5, True)
    assert routed.shared == MlpConfig(activation="relu2", intermediate_size=9, bias=True, gated=False)
    assert routed.router == RouterConfig(scoring="sigmoid", wide=True, renormalise=True)
    with pytest.raises(UnsupportedArchitecture, match="`mlp_hidden_act` 'silu'"):
        nemotron_h.parse_experts(raw_of(**values, mlp_hidden_act="silu"))


def test_experts_of_jamba() -> None:
    routed = jamba.parse_experts(raw_of(num_experts=4))
    assert routed.router == RouterConfig(scoring="softmax_all")
    assert (routed.num_chosen, routed.intermediate_size, routed.shared) == (2, 20, None)
