"""config.json of llama4 against transformers' reading of it: released models, both forms, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from rayk.kv.specs import ChunkedLocalSpec, FullAttentionSpec
from rayk.models.config import (
    DecoderConfig,
    ExpertsConfig,
    MlpConfig,
    NormConfig,
    RopeConfig,
    RouterConfig,
    TemperatureConfig,
)
from rayk.models.families import parse_config
from rayk.models.kv_specs import kv_cache_specs
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.models.released_llama4 import LLAMA_4_MAVERICK, LLAMA_4_SCOUT

RELEASED = {"scout": LLAMA_4_SCOUT, "maverick": LLAMA_4_MAVERICK}
SMALL: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "hidden_size": 64,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "vocab_size": 64,
    "attention_chunk_size": 32,
}


def theirs_of(raw: dict[str, Any]) -> Any:
    """transformers' config of the text model."""
    values = copy.deepcopy(raw.get("text_config", raw))
    values["attn_temperature_tuning"] = bool(values.get("attn_temperature_tuning", True))
    return transformers.Llama4TextConfig(**values)


def assert_alike(config: DecoderConfig, theirs: Any) -> None:
    """Layer by layer."""
    temperature = TemperatureConfig(scale=theirs.attn_scale, floor=theirs.floor_scale)
    for index, layer in enumerate(config.layers):
        turns = bool(theirs.no_rope_layers[index])
        assert (layer.rope is not None) == turns
        assert layer.temperature == (temperature if theirs.attn_temperature_tuning and not turns else None)
        chunked = theirs.layer_types[index] == "chunked_attention"
        assert (layer.chunk, layer.window) == (theirs.attention_chunk_size if chunked else None, None)
        assert isinstance(layer.mlp, ExpertsConfig) == (index in theirs.moe_layers)
        if isinstance(layer.mlp, MlpConfig):
            assert layer.mlp == MlpConfig(intermediate_size=theirs.intermediate_size_mlp)
    assert config.num_layers == theirs.num_hidden_layers
    assert config.head_size == theirs.head_dim
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.max_positions == theirs.max_position_embeddings
    assert config.norm == NormConfig(eps=theirs.rms_norm_eps)
    assert config.turned_norm_eps == (theirs.rms_norm_eps if theirs.use_qk_norm else None)
    assert (config.bos_token_id, config.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id)


@pytest.mark.parametrize("raw", RELEASED.values(), ids=RELEASED)
def test_released_checkpoints_in_both_forms(raw: dict[str, Any]) -> None:
    config = parse_config(raw)
    assert_alike(config, theirs_of(raw))
    values = copy.deepcopy(raw)
    if "attn_temperature_tuning" in values["text_config"]:
        values["text_config"]["attn_temperature_tuning"] = True
    new = transformers.Llama4Config(**values).to_dict()
    assert "rope_parameters" in new["text_config"]
    assert not {"rope_theta", "rope_scaling"} & new["text_config"].keys()
    assert parse_config(dict(new) | {"architectures": raw["architectures"]}) == config
    alone = new["text_config"] | {"architectures": ["Llama4ForCausalLM"]}
    assert parse_config(alone).layers == config.layers
    assert config.eos_token_ids == (200001, 200007, 200008)
    assert (config.dtype, config.vocab_size, config.tie_embeddings) == ("bfloat16", 202048, False)


def test_scout() -> None:
    """Experts in every layer; all but every fourth layer rotates and attends in chunks."""
    config = parse_config(LLAMA_4_SCOUT)
    rope = RopeConfig(
        kind="llama3",
        theta=5e5,
        rotary_size=128,
        pairing="interleaved",
        wide=True,
        factor=16.0,
        low_freq_factor=1.0,
        high_freq_factor=1.0,
        original_max_positions=8192,
    )
    assert [layer.rope for layer in config.layers] == [rope, rope, rope, None] * 12
    assert [layer.chunk for layer in config.layers] == [8192, 8192, 8192, None] * 12
    assert config.layers[3].temperature == TemperatureConfig(scale=0.1, floor=8192)
    assert {layer.mlp for layer in config.layers} == {
        ExpertsConfig(
            num_experts=16,
            num_chosen=1,
            intermediate_size=8192,
            kind="swiglu",
            router=RouterConfig(scoring="sigmoid_chosen"),
            weighs_inputs=True,
            shared=MlpConfig(intermediate_size=8192),
        )
    }
    specs = kv_cache_specs(config, block_size=16, dtype="bfloat16")
    assert specs[0, "attention"] == ChunkedLocalSpec(16, 8, 128, 128, "bfloat16", 40, 8192)
    assert specs[3, "attention"] == FullAttentionSpec(16, 8, 128, 128, "bfloat16", 40)
    assert why_tp_unsupported(config, 8) is None


def test_maverick() -> None:
    """Dense and routed layers take turns; the first release wrote a number where later ones say true."""
    config = parse_config(LLAMA_4_MAVERICK)
    assert config.turned_norm_eps is None
    assert [isinstance(layer.mlp, ExpertsConfig) for layer in config.layers] == [False, True] * 24
    assert config.layers[0].mlp == MlpConfig(intermediate_size=16384)
    assert config.layers[0].rope == RopeConfig(
        kind="default", theta=5e5, rotary_size=128, pairing="interleaved", wide=True
    )
    assert config.layers[3].temperature == TemperatureConfig(scale=0.1, floor=8192)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"no_rope_layer_interval": 3},
        {"no_rope_layers": [0, 1, 1, 0, 1, 0, 0, 1]},
        {"layer_types": ["full_attention", "chunked_attention"] * 4},
        {"interleave_moe_layer_step": 3},
        {"interleave_moe_layer_step": 9},
        {"moe_layers": [0, 3, 7]},
        {"moe_layers": []},
        {"attn_temperature_tuning": False},
        {"attn_scale": 0.3, "floor_scale": 17},
        {"use_qk_norm": False, "rms_norm_eps": 1e-3},
    ],
    ids=str,
)
def test_which_layers_are_what(changes: dict[str, Any]) -> None:
    raw = SMALL | changes
    assert_alike(parse_config(raw), theirs_of(raw))


CHUNK_NEEDED: dict[str, dict[str, Any]] = {
    "by-rope": {},
    "by-no-rope-layers": {"no_rope_layers": [0, 0, 0, 1, 0, 0, 0, 0]},
    "by-layer-types": {"layer_types": ["full_attention"] * 7 + ["chunked_attention"]},
}


@pytest.mark.parametrize(
    ("changes", "layer"), zip(CHUNK_NEEDED.values(), (0, 3, 7), strict=True), ids=CHUNK_NEEDED
)
def test_no_chunks_without_a_size(changes: dict[str, Any], layer: int) -> None:
    """transformers refuses to run such a model."""
    raw = SMALL | changes | {"attention_chunk_size": None}
    with pytest.raises(CheckpointError, match=f"`attention_chunk_size` is null, and layer {layer} attends"):
        parse_config(raw)
    model = transformers.Llama4ForCausalLM(theirs_of(raw | {"moe_layers": []}))
    with pytest.raises(ValueError, match="attention_chunk_size"):
        model(torch.zeros(1, 4, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize("no_rope_layers", [[], [0] * 8])
def test_no_size_where_nothing_is_chunked(no_rope_layers: list[int]) -> None:
    """Of layers that are listed as full ones, and of those that do not rotate."""
    kinds = {"layer_types": ["full_attention"] * 8} if not no_rope_layers else {}
    raw = SMALL | kinds | {"no_rope_layers": no_rope_layers, "attention_chunk_size": None}
    config = parse_config(raw)
    assert {layer.chunk for layer in config.layers} == {None}
    assert_alike(config, theirs_of(raw))


def test_where_config_json_is_silent() -> None:
    """What transformers' class says."""
    left = ("num_key_value_heads", "head_dim", "intermediate_size_mlp", "attention_chunk_size")
    raw = {key: value for key, value in SMALL.items() if key not in left}
    config, theirs = parse_config(raw), theirs_of(raw)
    assert_alike(config, theirs)
    mlp = config.layers[0].mlp
    assert isinstance(mlp, ExpertsConfig)
    assert (mlp.num_experts, mlp.num_chosen) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    rope = config.layers[0].rope
    assert rope is not None
    assert rope.theta == theirs.rope_parameters["rope_theta"]
    nulls = parse_config(SMALL | {"num_key_value_heads": None, "head_dim": None})
    assert (nulls.num_kv_heads, nulls.head_size) == (8, 8)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"no_rope_layers": [1, 0]}, CheckpointError, "`no_rope_layers` must say 1 .* of 8 layers"),
        ({"no_rope_layers": [1, 0, 2, 1] * 2}, CheckpointError, "`no_rope_layers` must say"),
        ({"no_rope_layers": 4}, CheckpointError, "`no_rope_layers` must say"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "`layer_types` must list 8 layers"),
        ({"layer_types": ["sliding_attention"] * 8}, UnsupportedArchitecture, "'sliding_attention'"),
        ({"attention_chunk_size": 0}, CheckpointError, "`attention_chunk_size` must be a positive integer"),
        ({"attn_temperature_tuning": "yes"}, CheckpointError, "`attn_temperature_tuning` must be true or"),
        ({"floor_scale": 0.5}, CheckpointError, "`floor_scale` must be a positive integer"),
        ({"attn_scale": -0.1}, CheckpointError, "`attn_scale` must be a positive number"),
        ({"moe_layers": 3}, CheckpointError, "`moe_layers` must list layers"),
        ({"moe_layers": ["1"]}, CheckpointError, "`moe_layers` must list layers"),
        ({"moe_layers": [0, 8]}, CheckpointError, r"layer 8, which is none of 8.*\n.*are 0 to 7"),
        ({"moe_layers": [-1]}, CheckpointError, "`moe_layers` lists layer -1, which is none of 8"),
        ({"num_experts_per_tok": 17}, UnsupportedArchitecture, "17 is more than the 16 experts"),
        ({"hidden_act": "gelu_pytorch_tanh"}, UnsupportedArchitecture, "`hidden_act`"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedArchitecture, "quantized"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedArchitecture, "'dynamic'"),
        ({"text_config": 3}, CheckpointError, "`text_config` must be an object"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        parse_config(SMALL | changes)


def test_quantized_releases_are_refused_by_name() -> None:
    quantized = {"quantization_config": {"quant_method": "hqq"}}
    for raw in (
        LLAMA_4_SCOUT | quantized,
        LLAMA_4_SCOUT | {"text_config": LLAMA_4_SCOUT["text_config"] | quantized},
    ):
        with pytest.raises(UnsupportedArchitecture, match="quantized weights of `quant_method` .hqq"):
            parse_config(raw)
