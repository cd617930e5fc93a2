"""config.json of gemma3n, in its forms, against transformers' reading of the same values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rayk.models.config import AltUpConfig, DecoderConfig, MlpConfig, NormConfig, RopeConfig
from rayk.models.families import parse_config
from rayk.models.fingerprint import fingerprint
from rayk.models.kv_specs import kv_cache_specs
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.models.released_gemma3n import GEMMA_3N_E2B, GEMMA_3N_E4B

RELEASED = {"E2B": GEMMA_3N_E2B, "E4B": GEMMA_3N_E4B}


def theirs_of(raw: dict[str, Any]) -> Any:
    """transformers' config of the text model."""
    return transformers.Gemma3nTextConfig(**copy.deepcopy(raw["text_config"]))


def text_model(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The text model alone, in the older form; "absent" leaves a key out."""
    values = {**raw["text_config"], "architectures": ["Gemma3nForCausalLM"], **changes}
    return {key: value for key, value in values.items() if value != "absent"}


@pytest.mark.parametrize("raw", RELEASED.values(), ids=RELEASED)
def test_released_models(raw: dict[str, Any]) -> None:
    config, theirs = parse_config(raw), theirs_of(raw)
    assert config.num_layers == theirs.num_hidden_layers
    windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
    assert [layer.window for layer in config.layers] == [windows[kind] for kind in theirs.layer_types]
    assert list(config.sharing_layers) == [
        i for i, mode in enumerate(theirs.kv_sharing_modes) if mode == "reuse"
    ]
    assert config.fast_prefill_layers == range(
        theirs.num_hidden_layers - theirs.num_kv_shared_layers, theirs.num_hidden_layers
    )
    # The layers that transformers lets others reuse, each the last of its type.
    stores = {theirs.layer_types[i]: i for i, mode in enumerate(theirs.kv_sharing_modes) if mode == "store"}
    for i in config.sharing_layers:
        assert config.layers[i].kv_source == stores[theirs.layer_types[i]]
    assert [layer.mlp for layer in config.layers] == [
        MlpConfig(activation="gelu_tanh", intermediate_size=size, sparsity=sparsity)
        for size, sparsity in zip(theirs.intermediate_size, theirs.activation_sparsity_pattern, strict=True)
    ]
    assert config.altup == AltUpConfig(
        num_streams=4,
        active_stream=0,
        scales_active=True,
        laurel_rank=64,
        per_layer_size=256,
        per_layer_vocab_size=262144,
    )
    assert config.layers[4].rope == RopeConfig(kind="default", theta=1e6, rotary_size=256)
    assert config.layers[0].rope == RopeConfig(kind="default", theta=1e4, rotary_size=256)
    assert config.norm == NormConfig(eps=1e-6, wide=True)
    assert (config.attention_scale, config.qk_norm, config.v_norm) == (1.0, True, True)
    assert (config.final_soft_cap, config.embedding_scale) == (30.0, 2048**0.5)
    assert (config.tie_embeddings, config.dtype, config.vocab_size) == (True, "bfloat16", 262400)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((1, 106), 2, 0)
    assert (config.num_query_heads, config.num_kv_heads, config.head_size) == (8, 2, 256)


@pytest.mark.parametrize("raw", RELEASED.values(), ids=RELEASED)
def test_every_form_says_the_same(raw: dict[str, Any]) -> None:
    """The text model within the whole one, alone, and as today's transformers writes either."""
    expected = without_origin(parse_config(raw))
    alone = text_model(raw, eos_token_id=[1, 106])
    assert without_origin(parse_config(alone)) == expected
    new = theirs_of(raw).to_dict()
    assert "rope_parameters" in new
    assert not {"rope_theta", "rope_local_base_freq"} & new.keys()
    within = {**{k: v for k, v in raw.items() if k != "text_config"}, "text_config": new}
    assert without_origin(parse_config(within)) == expected


def without_origin(config: DecoderConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__slots__ if name != "architecture"}


def test_what_config_json_leaves_out_is_as_transformers_has_it() -> None:
    """E4B's values are the defaults of its config class, but for the end of sequence."""
    silent = parse_config({"architectures": ["Gemma3nForCausalLM"], "dtype": "bfloat16"})
    released = parse_config(GEMMA_3N_E4B)
    assert without_origin(silent) == without_origin(released) | {"eos_token_ids": (1,)}
    default = transformers.Gemma3nTextConfig()
    assert [layer.mlp.sparsity for layer in silent.layers] == default.activation_sparsity_pattern
    few = parse_config(text_model(GEMMA_3N_E2B, num_hidden_layers=10, **FEW_LAYERS))
    assert {layer.mlp.sparsity for layer in few.layers} == {0.0}
    assert [layer.window for layer in few.layers] == [512, 512, 512, 512, None] * 2


FEW_LAYERS: dict[str, Any] = {
    "layer_types": "absent",
    "activation_sparsity_pattern": "absent",
    "intermediate_size": 100,
    "num_kv_shared_layers": 3,
}


def test_only_layers_of_their_own_have_pages() -> None:
    config = parse_config(GEMMA_3N_E4B)
    specs = kv_cache_specs(config, block_size=16, dtype="bfloat16")
    assert sorted(specs) == [(i, "attention") for i in range(20)]
    assert why_tp_unsupported(config, 8) is None
    assert why_tp_unsupported(config, 16) == "TP 16 does not divide the model's 8 query heads"


def test_nothing_shared() -> None:
    config = parse_config(text_model(GEMMA_3N_E2B, num_kv_shared_layers=0))
    assert config.sharing_layers == ()
    assert len(config.fast_prefill_layers) == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("altup_num_inputs", 3),
        ("altup_active_idx", 1),
        ("altup_correct_scale", False),
        ("hidden_size_per_layer_input", 128),
        ("laurel_rank", 32),
        ("activation_sparsity_pattern", [0.95] * 9 + [0.0] * 21),
        ("num_kv_shared_layers", 5),
    ],
)
def test_the_fingerprint_tells_models_apart(tmp_path: Any, key: str, value: Any) -> None:
    """Two engines with unlike settings would read each other's keys wrongly."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    right = fingerprint(tmp_path, parse_config(text_model(GEMMA_3N_E2B)))
    wrong = fingerprint(tmp_path, parse_config(text_model(GEMMA_3N_E2B, **{key: value})))
    assert right != wrong


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"altup_active_idx": 4}, CheckpointError, "`altup_active_idx` 4 is none of 4 streams"),
        ({"altup_active_idx": -1}, CheckpointError, "`altup_active_idx` must be an integer of zero or more"),
        ({"altup_num_inputs": 0}, CheckpointError, "`altup_num_inputs` must be a positive"),
        ({"altup_correct_scale": 1}, CheckpointError, "`altup_correct_scale` must be true or false"),
        ({"laurel_rank": "64"}, CheckpointError, "`laurel_rank` must be a positive"),
        ({"hidden_size_per_layer_input": 0}, CheckpointError, "`hidden_size_per_layer_input` must be"),
        ({"intermediate_size": [8192] * 29}, CheckpointError, r"list 30 \(`num_hidden_layers`\), not 29"),
        ({"intermediate_size": [8192] * 29 + [None]}, CheckpointError, "`intermediate_size` is missing"),
        ({"activation_sparsity_pattern": 0.95}, CheckpointError, "must list 30 numbers"),
        ({"activation_sparsity_pattern": [0.95] * 29 + [1.0]}, CheckpointError, "below 1, not 1.0"),
        ({"activation_sparsity_pattern": [0.95] * 29 + ["x"]}, CheckpointError, "below 1, not 'x'"),
        ({"num_kv_shared_layers": 30}, CheckpointError, "leaves none of 30 layers"),
        ({"num_kv_shared_layers": 26}, CheckpointError, "layer 4 .* there is none"),
        ({"altup_active_idx": False}, CheckpointError, "of zero or more, not False"),
        ({"num_kv_shared_layers": -1}, CheckpointError, "must be an integer of zero or more, not -1"),
        ({"kv_sharing_targets": [None] * 30}, UnsupportedArchitecture, "`kv_sharing_targets`"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "must list 30 layers"),
        ({"layer_types": ["chunked_attention"] * 30}, UnsupportedArchitecture, "'chunked_attention'"),
        ({"hidden_activation": "relu"}, UnsupportedArchitecture, "`hidden_activation` 'relu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedArchitecture, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "default"}}, CheckpointError, "an object per layer type"),
        ({"use_bidirectional_attention": True}, UnsupportedArchitecture, "bidirectional"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedArchitecture, "hqq"),
        ({"num_key_value_heads": 3}, CheckpointError, "3 does not divide"),
        ({"text_config": []}, CheckpointError, "`text_config` must be an object"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        parse_config(text_model(GEMMA_3N_E2B, **changes))
