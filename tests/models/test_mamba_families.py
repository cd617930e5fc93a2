"""config.json of families with Mamba layers, in old and new forms, against transformers' config classes."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rayk.models.config import (
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    Mamba1Config,
    Mamba2Config,
    MlpConfig,
    NormConfig,
    RopeConfig,
)
from rayk.models.families import parse_config
from rayk.models.fingerprint import fingerprint
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.models import released_mamba as released
from tests.models.tiny import CLASSES

RELEASED = {
    "mamba-codestral-7b": released.MAMBA_CODESTRAL_7B,
    "jamba-v0.1": released.JAMBA_V01,
    "bamba-9b": released.BAMBA_9B,
    "granite-4.0-h-tiny": released.GRANITE_4_H_TINY,
    "nemotron-h-8b": released.NEMOTRON_H_8B,
    "nemotron-3-nano": released.NEMOTRON_3_NANO,
    "falcon-h1-0.5b": released.FALCON_H1_500M,
}
KINDS = {"mamba1": "linear_attention", "mamba2": "linear_attention", "attention": "full_attention"}


def theirs(raw: dict[str, Any]) -> Any:
    """transformers' config of a config.json."""
    name = next(c for c, model in CLASSES.values() if model == raw["architectures"][0])
    return getattr(transformers, name)(**copy.deepcopy(raw))


@pytest.mark.parametrize("raw", RELEASED.values(), ids=RELEASED)
def test_released_checkpoints_in_both_forms(raw: dict[str, Any]) -> None:
    """What was published, and what this transformers writes of it: names of layers, Infinity, dtype."""
    config = parse_config(raw)
    new = json.loads(theirs(raw).to_json_string(use_diff=False)) | {"architectures": raw["architectures"]}
    assert "torch_dtype" not in new
    assert parse_config(new) == config
    assert config.vocab_size == theirs(raw).vocab_size
    assert config.tie_embeddings == theirs(raw).tie_word_embeddings
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("raw", list(RELEASED.values())[1:6], ids=list(RELEASED)[1:6])
def test_kinds_of_layers(raw: dict[str, Any]) -> None:
    kinds = [
        KINDS.get(layer.mixer) or ("moe" if isinstance(layer.mlp, ExpertsConfig) else "mlp")
        for layer in parse_config(raw).layers
    ]
    assert kinds == list(theirs(raw).layer_types)


def test_mamba_codestral_7b() -> None:
    config = parse_config(released.MAMBA_CODESTRAL_7B)
    assert config.mamba2 == Mamba2Config(
        num_heads=128,
        head_size=64,
        num_groups=8,
        state_size=128,
        conv_width=4,
        conv_bias=True,
        proj_bias=False,
        gate="gate_norm",
        norm_eps=1e-5,
    )
    assert set(config.layers) == {LayerConfig(mixer="mamba2", rope=None, mlp=None)}
    assert (config.num_layers, config.attention_layers, config.residual_wide) == (64, (), True)
    assert config.max_positions == 1 << 20
    assert parse_config(released.MAMBA_CODESTRAL_7B | {"max_position_embeddings": 77}).max_positions == 77
    assert why_tp_unsupported(config, 8) is None
    assert why_tp_unsupported(config, 3) == "TP 3 does not divide the model's 128 Mamba heads"


def test_jamba_v01() -> None:
    config = parse_config(released.JAMBA_V01)
    assert config.mamba1 == Mamba1Config(
        num_channels=8192,
        state_size=16,
        conv_width=4,
        dt_rank=256,
        conv_bias=True,
        proj_bias=False,
        inner_norm_eps=1e-6,
    )
    assert config.attention_layers == (4, 12, 20, 28)
    assert all(layer.rope is None for layer in config.layers)
    experts = [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, ExpertsConfig)]
    assert experts == list(range(1, 32, 2))
    assert [n > 1 for n in theirs(released.JAMBA_V01).layers_num_experts] == [i % 2 == 1 for i in range(32)]
    assert config.max_positions == 262144
    auto = parse_config(released.JAMBA_V01 | {"mamba_dt_rank": "auto"})
    assert auto.mamba1 == config.mamba1
    dense = parse_config(released.JAMBA_V01 | {"num_experts": 1})
    assert {type(layer.mlp) for layer in dense.layers} == {MlpConfig}


def test_bamba_9b() -> None:
    config = parse_config(released.BAMBA_9B)
    assert config.attention_layers == (9, 18, 27)
    assert config.layers[9].rope == RopeConfig(kind="default", theta=1e4, rotary_size=64)
    assert config.head_size == 128
    assert config.mamba2 is not None
    assert (config.mamba2.num_groups, config.mamba2.gate) == (1, "gate_norm")
    auto = parse_config(released.BAMBA_9B | {"mamba_d_head": "auto"})
    assert auto.mamba2 == config.mamba2
    recurrent = parse_config(released.BAMBA_9B | {"attn_layer_indices": None})
    assert recurrent.attention_layers == ()
    assert why_tp_unsupported(recurrent, 64) is None


def test_granite_4_h_tiny() -> None:
    config = parse_config(released.GRANITE_4_H_TINY)
    assert config.attention_layers == (5, 15, 25, 35)
    assert config.layers[5].rope is None
    assert (config.attention_scale, config.residual_multiplier) == (0.0078125, 0.22)
    assert (config.embedding_scale, config.logit_scale) == (12.0, 1 / 6)
    rotating = parse_config(released.GRANITE_4_H_TINY | {"position_embedding_type": "rope"})
    assert rotating.layers[5].rope == RopeConfig(kind="default", theta=1e4, rotary_size=128)
    assert rotating.layers[4].rope is None
    absent = {k: v for k, v in released.GRANITE_4_H_TINY.items() if k != "layer_types"}
    assert parse_config(absent).attention_layers == ()


def test_nemotron_h_8b() -> None:
    config = parse_config(released.NEMOTRON_H_8B)
    assert config.num_layers == 52
    assert config.attention_layers == (7, 18, 29, 40)
    halves = {(layer.mixer == "none", layer.mlp is None) for layer in config.layers}
    assert halves == {(True, False), (False, True)}
    assert config.norm == NormConfig(eps=1e-5, wide=True)
    mlp = MlpConfig(activation="relu2", intermediate_size=21504, gated=False)
    assert config.layers[1] == LayerConfig(mixer="none", rope=None, mlp=mlp)


def test_older_names_of_nemotron_h() -> None:
    """transformers renames them too (nemotron_h/configuration_nemotron_h.py)."""
    names = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
    raw = {names.get(key, key): value for key, value in released.NEMOTRON_H_8B.items()}
    raw |= {"mamba_n_groups": 4, "mamba_d_conv": 3}
    settings = parse_config(raw).mamba2
    assert settings is not None
    assert (settings.num_groups, settings.conv_width) == (theirs(raw).n_groups, theirs(raw).conv_kernel)
    assert (settings.num_groups, settings.conv_width) == (4, 3)


def test_falcon_h1() -> None:
    raw = released.FALCON_H1_500M
    config = parse_config(raw)
    assert {layer.mixer for layer in config.layers} == {"attention+mamba2"}
    assert config.attention_layers == config.state_layers == tuple(range(36))
    assert config.layers[0].rope == RopeConfig(kind="default", theta=1e11, rotary_size=64)
    settings = config.mamba2
    assert settings is not None
    assert (settings.num_heads * settings.head_size, settings.gate) == (1536, "plain")
    assert settings.part_multipliers == tuple(raw["ssm_multipliers"])
    assert (settings.in_multiplier, settings.out_multiplier) == (1.25, 0.23)
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    assert (mlp.gate_multiplier, mlp.down_multiplier) == (0.88, 0.58)
    for first, gate in ((True, "norm_gate"), (False, "gate_norm")):
        normed = parse_config(raw | {"mamba_rms_norm": True, "mamba_norm_before_gate": first}).mamba2
        assert normed is not None
        assert normed.gate == gate
    wide = parse_config(raw | {"mamba_d_ssm": None, "mamba_n_heads": 32}).mamba2
    assert wide is not None
    assert wide.num_heads * wide.head_size == 2048
    biased = parse_config(raw | {"projectors_bias": True}).mamba2
    assert biased is not None
    assert (biased.proj_bias, biased.out_bias) == (False, True)
    assert parse_config(raw | {"num_key_value_heads": None}).num_kv_heads == 8


@pytest.mark.parametrize(
    ("name", "changes", "error", "match"),
    [
        ("mamba-codestral-7b", {"time_step_limit": [0.001, 0.1]}, UnsupportedArchitecture, "time_step_limit"),
        ("bamba-9b", {"time_step_limit": [0.0, 0.1]}, UnsupportedArchitecture, "limits the time steps"),
        (
            "falcon-h1-0.5b",
            {"time_step_limit": [0.01, {"__float__": "Infinity"}]},
            UnsupportedArchitecture,
            "in prefill but not in decode",
        ),
        ("granite-4.0-h-tiny", {"time_step_limit": 3}, CheckpointError, "must list two numbers"),
        ("nemotron-h-8b", {"time_step_min": 0.05}, UnsupportedArchitecture, "`time_step_min` 0.05"),
        ("nemotron-h-8b", {"mamba_dt_min": 0.05}, UnsupportedArchitecture, "`time_step_min` 0.05"),
        ("mamba-codestral-7b", {"hidden_act": "gelu"}, UnsupportedArchitecture, "`hidden_act` 'gelu'"),
        (
            "bamba-9b",
            {"hidden_act": "gelu_pytorch_tanh"},
            UnsupportedArchitecture,
            "`hidden_act` 'gelu_pytorch_tanh'",
        ),
        ("nemotron-h-8b", {"mlp_hidden_act": "silu"}, UnsupportedArchitecture, "`mlp_hidden_act` 'silu'"),
        ("mamba-codestral-7b", {"num_heads": 127}, CheckpointError, "127 x `head_dim` 64 is not"),
        ("bamba-9b", {"mamba_n_heads": 127}, CheckpointError, "not the inner width 8192"),
        ("bamba-9b", {"mamba_n_groups": 3}, CheckpointError, "3 does not divide the 128 Mamba heads"),
        ("bamba-9b", {"attn_layer_indices": [32]}, CheckpointError, "some of layers 0 to 31"),
        ("bamba-9b", {"mamba_d_conv": 1}, UnsupportedArchitecture, "sees one token"),
        ("jamba-v0.1", {"attn_layer_offset": 8}, CheckpointError, "must be below `attn_layer_period` 8"),
        ("jamba-v0.1", {"expert_layer_offset": -1}, CheckpointError, "`expert_layer_offset`"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"]}, CheckpointError, "must list 40 layers"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba", "rwkv"] * 20}, UnsupportedArchitecture, "'rwkv'"),
        (
            "granite-4.0-h-tiny",
            {"position_embedding_type": "learned"},
            UnsupportedArchitecture,
            "`position_embedding_type` 'learned'",
        ),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M-X"}, UnsupportedArchitecture, "layer 2 of kind 'X'"),
        ("falcon-h1-0.5b", {"ssm_multipliers": [1.0]}, CheckpointError, "must list 5 numbers"),
        ("falcon-h1-0.5b", {"mlp_multipliers": "no"}, CheckpointError, "must list 2 numbers"),
        ("mamba-codestral-7b", {"quantization_config": {"bits": 4}}, UnsupportedArchitecture, "quantized"),
    ],
)
def test_refusals(name: str, changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        parse_config(RELEASED[name] | changes, where="/models/x/config.json")
    assert str(caught.value).startswith("/models/x/config.json")


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("mamba-codestral-7b", {"conv_kernel": 3}, {"mixer_settings"}),
        ("mamba-codestral-7b", {"residual_in_fp32": False}, {"block"}),
        ("mamba-codestral-7b", {"chunk_size": 128, "time_step_max": 0.2}, set()),
        ("jamba-v0.1", {"mamba_d_state": 8}, {"mixer_settings"}),
        ("jamba-v0.1", {"attn_layer_offset": 3}, {"mixers"}),
        ("jamba-v0.1", {"expert_layer_offset": 0}, {"mlps"}),
        ("granite-4.0-h-tiny", {"attention_multiplier": 0.5}, {"attention_settings"}),
        ("granite-4.0-h-tiny", {"residual_multiplier": 0.5}, {"block"}),
        ("granite-4.0-h-tiny", {"position_embedding_type": "rope"}, {"rope"}),
        ("falcon-h1-0.5b", {"mamba_rms_norm": True}, {"mixer_settings"}),
        ("falcon-h1-0.5b", {"ssm_multipliers": [1.0] * 5}, {"mixer_settings"}),
        ("falcon-h1-0.5b", {"key_multiplier": 1.0}, {"attention_settings"}),
        ("falcon-h1-0.5b", {"attention_out_multiplier": 1.0}, {"attention_settings"}),
        ("falcon-h1-0.5b", {"mlp_multipliers": [1.0, 1.0]}, {"mlps"}),
        ("falcon-h1-0.5b", {"lm_head_multiplier": 1.0}, set()),
        ("nemotron-3-nano", {"routed_scaling_factor": 1.0}, {"mlps"}),
    ],
)
def test_each_setting_shows_in_the_fingerprint(
    tmp_path: Path, name: str, changes: dict[str, Any], fields: set[str]
) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    before, after = (
        fingerprint(tmp_path, parse_config(values)) for values in (RELEASED[name], RELEASED[name] | changes)
    )
    assert {key for key in before if before[key] != after[key]} == fields


def test_every_setting_of_a_recurrent_layer_shows(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for raw, name in ((released.FALCON_H1_500M, "mamba2"), (released.JAMBA_V01, "mamba1")):
        config = parse_config(raw)
        before = fingerprint(tmp_path, config)
        settings = getattr(config, name)
        for field in dataclasses.fields(settings):
            changed = dataclasses.replace(settings, **{field.name: other(getattr(settings, field.name))})
            made: DecoderConfig = dataclasses.replace(config, **{name: changed})
            assert fingerprint(tmp_path, made) != before, field.name


def other(value: Any) -> Any:
    """Something else of the same type."""
    if isinstance(value, tuple):
        return (*value[:-1], other(value[-1]))
    return {bool: lambda v: not v, str: lambda v: v + "x"}.get(type(value), lambda v: v * 2)(value)
