"""config.json to DecoderConfig, against what transformers makes of the same values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rayk.models.families import FAMILIES, SUPPORTED, load_config, parse_config
from rayk.models.layers.rope import inverse_frequencies
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.models.tiny import CLASSES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def values(family: str, **changes: Any) -> dict[str, Any]:
    """The family's debug config.json, in the old form of released checkpoints."""
    made = {
        **FAMILIES[family].tiny,
        "architectures": [FAMILIES[family].architecture],
        "vocab_size": 300,
        "torch_dtype": "bfloat16",
        "eos_token_id": [2, 7],
        **changes,
    }
    return {key: value for key, value in made.items() if value != "absent"}


def test_supported_lists_every_family() -> None:
    assert set(FAMILIES) == set(CLASSES)
    assert SUPPORTED == (
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    )  # fmt: skip


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("form", ["old", "new"])
def test_both_forms_of_config_json(family: str, form: str) -> None:
    """What save_pretrained of this transformers writes, and what released checkpoints hold."""
    raw = values(family)
    if form == "new":
        raw = getattr(transformers, CLASSES[family][0])(**raw).to_dict()
        assert "rope_parameters" in raw
        assert "rope_theta" not in raw
        raw |= {"architectures": [FAMILIES[family].architecture]}
    config = parse_config(raw)
    tiny = FAMILIES[family].tiny
    assert config.family == family
    assert config.num_layers == len(config.layers) == 4
    assert config.head_size == tiny.get("head_dim", 16)
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (2, 7)
    rope = config.layers[0].rope
    assert rope is not None
    assert rope.theta == 10000.0
    assert rope.kind == ("llama3" if family == "llama" else "default")
    assert {layer.window for layer in config.layers} == {50 if family == "mistral" else None}
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 40, "use_sliding_window": False, "max_window_layers": 1}, [None] * 4),
        ({"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}, [None, 40, 40, 40]),
        ({"sliding_window": 40, "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 4),
        (
            {
                "sliding_window": 40,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 40, None, 40],
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_by_layer(family: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    raw = values(family, **changes)
    assert [layer.window for layer in parse_config(raw).layers] == windows
    theirs = getattr(transformers, CLASSES[family][0])(**raw)
    assert windows == [
        theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types
    ]


def test_defaults_where_config_json_is_silent() -> None:
    assert parse_config(values("qwen3", head_dim="absent")).head_size == 128
    assert parse_config(values("llama", head_dim="absent")).head_size == 8
    assert parse_config(values("llama", head_dim=None)).head_size == 8
    assert parse_config(values("llama", num_key_value_heads="absent")).num_kv_heads == 8
    assert parse_config(values("llama", rms_norm_eps="absent")).rms_norm_eps == 1e-6
    assert parse_config(values("llama", torch_dtype="absent")).dtype == "float32"
    assert parse_config(values("llama", torch_dtype="absent", dtype="float16")).dtype == "float16"
    assert parse_config(values("llama", eos_token_id="absent")).eos_token_ids == ()
    assert parse_config(values("mistral", sliding_window=None)).layers[0].window is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        {**LLAMA3, "low_freq_factor": 2.0, "factor": 32.0},
    ],
)
def test_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    raw = values("llama", rope_scaling=rope, head_dim=64)
    config = parse_config(raw).layers[0].rope
    assert config is not None
    theirs = transformers.LlamaConfig(**raw)
    if rope["rope_type"] == "default":
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
        expected = module.inv_freq
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    assert torch.equal(inverse_frequencies(config), expected)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"architectures": "absent"}, CheckpointError, "`architectures` is missing"),
        ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedArchitecture, "GPT2LMHeadModel"),
        ({"hidden_size": "absent"}, CheckpointError, "`hidden_size` is missing"),
        ({"hidden_size": "64"}, CheckpointError, "`hidden_size` must be a positive integer"),
        ({"num_hidden_layers": 0}, CheckpointError, "`num_hidden_layers` must be a positive"),
        ({"num_key_value_heads": 3}, CheckpointError, "3 does not divide"),
        ({"head_dim": 15}, CheckpointError, "15 is odd"),
        ({"rms_norm_eps": -1.0}, CheckpointError, "`rms_norm_eps` must be a positive number"),
        ({"tie_word_embeddings": "yes"}, CheckpointError, "true or false"),
        ({"eos_token_id": "</s>"}, CheckpointError, "`eos_token_id` must be token ids"),
        ({"hidden_act": "gelu"}, UnsupportedArchitecture, "`hidden_act` 'gelu'"),
        ({"torch_dtype": "int8"}, UnsupportedArchitecture, "`dtype` 'int8'"),
        ({"quantization_config": {"bits": 4}}, UnsupportedArchitecture, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, UnsupportedArchitecture, "'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedArchitecture, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, UnsupportedArchitecture, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, CheckpointError, "rope: `factor` is missing"),
        ({"rope_scaling": [1]}, CheckpointError, "must be an object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            UnsupportedArchitecture,
            "per layer type",
        ),
        ({"partial_rotary_factor": 0.5}, UnsupportedArchitecture, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "must list 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, UnsupportedArchitecture, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, CheckpointError, "set no window"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        parse_config(values("qwen3", **changes), where="/models/x/config.json")
    assert str(caught.value).startswith("/models/x/config.json")


def test_unsupported_architecture_lists_what_is() -> None:
    with pytest.raises(UnsupportedArchitecture) as caught:
        parse_config({"architectures": ["MambaForCausalLM"]})
    assert caught.value.architecture == "MambaForCausalLM"
    assert caught.value.supported == SUPPORTED
    assert all(name in str(caught.value) for name in SUPPORTED)


def folder(path: Path, config: str | None, *files: str) -> Path:
    if config is not None:
        (path / "config.json").write_text(config)
    for name in files:
        (path / name).write_bytes(b"")
    return path


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint folder") as caught:
        load_config(tmp_path / "nothing")
    assert "rayk checkpoint" in str(caught.value)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "match"),
    [("{", r"not valid JSON.*line 1"), ("[1]", "not a JSON object"), ("\udcff", "cannot be read")],
)
def test_unreadable_config(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=match):
        load_config(tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    folder(tmp_path, json.dumps(values("llama")), "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no .safetensors weights \(only pytorch_model.bin\)"):
        load_config(tmp_path)


def test_generation_config_decides_the_end_of_sequence(tmp_path: Path) -> None:
    folder(tmp_path, json.dumps(values("llama", eos_token_id=2)), "model.safetensors")
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_config(tmp_path).eos_token_ids == (5, 6)


@pytest.mark.parametrize("name", ["families", "config", "kv_specs", "fingerprint"])
def test_free_of_torch(name: str) -> None:
    code = f"import rayk.models.{name}, sys; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
