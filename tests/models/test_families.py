"""config.json to DecoderConfig, against what transformers makes of the same values."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from rayk.models import families
from rayk.models.config import ExpertsConfig, NormConfig, RopeConfig
from rayk.models.families import FAMILIES, SUPPORTED, load_config, parse_config
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.models import released
from tests.models.released import small
from tests.models.tiny import CLASSES


def config_class(raw: dict[str, Any]) -> Any:
    """transformers' config of a config.json, or of its text model."""
    name = raw["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
    (family,) = (family for family, (_, model) in CLASSES.items() if model == name)
    values = raw.get("text_config", raw)
    return getattr(transformers, CLASSES[family][0])(**copy.deepcopy(values))


def test_every_family_is_found() -> None:
    """Those that have a file; transformers names their architectures, but for those of larger models."""
    files = Path(families.__file__).parent.glob("*.py")
    assert set(FAMILIES) == {f.stem for f in files if "\nFAMILY = " in f.read_text()} == set(CLASSES)
    assert len(FAMILIES) >= 19
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert set(FAMILIES) <= set(re.findall(r"\w+", page.read_text()))
    assert {n for n in SUPPORTED if n.endswith("CausalLM")} == {model for _, model in CLASSES.values()}
    assert {f"{name}ForConditionalGeneration" for name in ("Gemma3", "Gemma3n", "Llama4")} < set(SUPPORTED)


@pytest.mark.parametrize("family", list(released.SMALL))
@pytest.mark.parametrize("form", ["old", "new"])
def test_both_forms_of_config_json(family: str, form: str) -> None:
    """What save_pretrained of this transformers writes, and what released checkpoints hold."""
    raw = small(family)
    if form == "new":
        raw = in_new_form(raw)
    config = parse_config(raw)
    assert config.family == family
    assert config.num_layers == len(config.layers) == 4
    assert config.head_size == (24 if family == "mistral" else 16)
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (2, 7)
    rope = config.layers[0].rope
    assert rope is not None
    assert rope.theta == 10000.0
    assert rope.kind == ("llama3" if family == "llama" else "default")
    assert {layer.window for layer in config.layers} == {50 if family == "mistral" else None}
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")


def in_new_form(raw: dict[str, Any]) -> dict[str, Any]:
    """As this transformers writes the same model."""
    made = config_class(raw).to_dict()
    assert "rope_parameters" in made
    assert not {"rope_theta", "rope_scaling", "torch_dtype"} & made.keys()
    return dict(made) | {"architectures": raw["architectures"]}


RELEASED = {
    "gemma-2-2b": released.GEMMA_2_2B,
    "gemma-3-1b": released.GEMMA_3_1B,
    "phi-3-mini-4k": released.PHI_3_MINI_4K,
    "phi-4-mini": released.PHI_4_MINI,
    "command-r7b": released.COMMAND_R7B,
    "gpt-oss-20b": {k: v for k, v in released.GPT_OSS_20B.items() if k != "quantization_config"},
}


@pytest.mark.parametrize("raw", RELEASED.values(), ids=RELEASED)
def test_released_checkpoints_in_both_forms(raw: dict[str, Any]) -> None:
    config = parse_config(raw)
    assert parse_config(in_new_form(raw)) == config
    theirs = config_class(raw)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    assert [layer.window for layer in config.layers] == [
        theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds
    ]
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.vocab_size == theirs.vocab_size


def test_gemma_2_2b() -> None:
    config = parse_config(released.GEMMA_2_2B)
    assert [layer.window for layer in config.layers] == [4096, None] * 13
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert not config.qk_norm
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = parse_config(released.GEMMA_2_2B | uncapped)
    assert (config.attention_soft_cap, config.final_soft_cap) == (None, None)


def test_gemma_3_1b() -> None:
    config = parse_config(released.GEMMA_3_1B)
    assert [i for i, layer in enumerate(config.layers) if layer.window is None] == [5, 11, 17, 23]
    assert config.layers[5].rope == RopeConfig(kind="default", theta=1e6, rotary_size=256)
    assert config.layers[4].rope == RopeConfig(kind="default", theta=1e4, rotary_size=256)
    assert config.layers[4].window == 512
    assert config.norm == NormConfig(eps=1e-6, wide=True, offset=1.0)
    assert config.attention_scale == 1 / 16
    assert config.embedding_scale == 1152**0.5
    assert config.attention_soft_cap is None
    assert config.final_soft_cap is None
    assert (config.block, config.qk_norm, config.tie_embeddings) == ("post_norms", True, True)


def test_gemma_3_4b_is_its_text_model() -> None:
    """What text_config leaves out is what transformers' class says."""
    config = parse_config(released.GEMMA_3_4B)
    theirs = config_class(released.GEMMA_3_4B)
    assert (config.num_query_heads, config.num_kv_heads, config.head_size) == (8, 4, 256)
    assert config.vocab_size == theirs.vocab_size == 262208
    assert config.max_positions == theirs.max_position_embeddings == 131072
    assert config.layers[5].rope == RopeConfig(kind="linear", theta=1e6, rotary_size=256, factor=8.0)
    assert config.layers[0].rope == RopeConfig(kind="default", theta=1e4, rotary_size=256)
    assert config.layers[0].window == 1024
    assert (config.dtype, config.eos_token_ids, config.bos_token_id) == ("bfloat16", (1, 106), 2)
    assert config.tie_embeddings


def test_phi_4_mini_serves_what_the_short_factors_reach() -> None:
    config = parse_config(released.PHI_4_MINI)
    rope = config.layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.rotary_size, rope.short_factors) == ("longrope", 96, (1.0,) * 48)
    assert config.head_size == 128
    assert (config.max_positions, config.stated_positions) == (4096, 131072)
    assert all(text in config.positions_text for text in ("4096 positions", "131072", "longrope"))
    plain = parse_config(released.PHI_3_MINI_4K)
    assert plain.positions_text == "the model's 4096 positions"
    assert plain.layers[0].window == 2047
    for name in ("su", "yarn"):
        old = released.PHI_4_MINI["rope_scaling"] | {"type": name}
        assert parse_config(released.PHI_4_MINI | {"rope_scaling": old}) == config


def test_command_r7b() -> None:
    config = parse_config(released.COMMAND_R7B)
    rope = RopeConfig(kind="default", theta=5e4, rotary_size=128, pairing="interleaved")
    assert [layer.rope for layer in config.layers] == [rope, rope, rope, None] * 8
    assert [layer.window for layer in config.layers] == [4096, 4096, 4096, None] * 8
    assert config.norm == NormConfig(kind="layer", eps=1e-5, wide=True)
    assert (config.block, config.logit_scale, config.tie_embeddings) == ("parallel", 0.25, True)


def test_gpt_oss_20b() -> None:
    config = parse_config(RELEASED["gpt-oss-20b"])
    quantised = parse_config(released.GPT_OSS_20B)
    assert quantised.quantisation is not None
    assert quantised.quantisation.text == "mxfp4"
    assert replace(quantised, quantisation=None) == config
    assert [layer.window for layer in config.layers] == [128, None] * 12
    assert config.layers[0].mlp == ExpertsConfig(
        num_experts=32, num_chosen=4, intermediate_size=2880, alpha=1.702, limit=7.0
    )
    rope = config.layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.truncate) == ("yarn", 150000.0, False)
    assert (config.sinks, config.qkv_bias, config.o_bias) == (True, True, True)
    assert config.norm == NormConfig(eps=1e-5, wide=True)


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
    raw = small(family, **changes)
    assert [layer.window for layer in parse_config(raw).layers] == windows
    theirs = getattr(transformers, CLASSES[family][0])(**raw)
    assert windows == [
        theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types
    ]


def test_defaults_where_config_json_is_silent() -> None:
    assert parse_config(small("qwen3", head_dim="absent")).head_size == 128
    assert parse_config(small("llama", head_dim="absent")).head_size == 8
    assert parse_config(small("llama", head_dim=None)).head_size == 8
    assert parse_config(small("llama", num_key_value_heads="absent")).num_kv_heads == 8
    assert parse_config(small("llama", rms_norm_eps="absent")).norm.eps == 1e-6
    assert parse_config(small("llama", torch_dtype="absent")).dtype == "float32"
    assert parse_config(small("llama", torch_dtype="absent", dtype="float16")).dtype == "float16"
    assert parse_config(small("llama", eos_token_id="absent")).eos_token_ids == ()
    assert parse_config(small("mistral", sliding_window=None)).layers[0].window is None


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"architectures": "absent"}, CheckpointError, "`architectures` is missing"),
        ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedArchitecture, "GPT2LMHeadModel"),
        ({"hidden_size": "absent"}, CheckpointError, "`hidden_size` is missing"),
        ({"hidden_size": "64"}, CheckpointError, "`hidden_size` must be a positive integer"),
        ({"num_hidden_layers": 0}, CheckpointError, "`num_hidden_layers` must be a positive"),
        ({"num_key_value_heads": 3}, CheckpointError, "3 does not divide"),
        ({"head_dim": 15}, CheckpointError, "15 of `head_dim` 15 cannot rotate"),
        ({"rms_norm_eps": -1.0}, CheckpointError, "`rms_norm_eps` must be a positive number"),
        ({"rms_norm_eps": float("nan")}, CheckpointError, "`rms_norm_eps` must be a positive number"),
        ({"hidden_act": ["silu"]}, UnsupportedArchitecture, "`hidden_act`"),
        ({"tie_word_embeddings": "yes"}, CheckpointError, "true or false"),
        ({"eos_token_id": "</s>"}, CheckpointError, "`eos_token_id` must be token ids"),
        ({"hidden_act": "gelu"}, UnsupportedArchitecture, "`hidden_act` 'gelu'"),
        ({"torch_dtype": "int8"}, UnsupportedArchitecture, "`dtype` 'int8'"),
        ({"quantization_config": {"bits": 4}}, UnsupportedArchitecture, "quantization_config"),
        ({"rope_scaling": {"type": "yarn"}}, CheckpointError, "rope: `factor` is missing"),
        ({"rope_scaling": {"type": "su"}}, UnsupportedArchitecture, "'su'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedArchitecture, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "proportional"}}, UnsupportedArchitecture, "'proportional'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, CheckpointError, "`short_factor` must list 8 numbers"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0]}},
            CheckpointError,
            "`short_factor` must list positive numbers",
        ),
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
        parse_config(small("qwen3", **changes), where="/models/x/config.json")
    assert str(caught.value).startswith("/models/x/config.json")


@pytest.mark.parametrize(
    ("raw", "changes", "error", "match"),
    [
        (
            released.GEMMA_3_1B,
            {"use_bidirectional_attention": True},
            UnsupportedArchitecture,
            "bidirectional",
        ),
        (released.GEMMA_3_1B, {"hidden_activation": "relu"}, UnsupportedArchitecture, "`hidden_activation`"),
        (released.GEMMA_3_1B, {"text_config": 3}, CheckpointError, "`text_config` must be an object"),
        (released.GEMMA_3_1B, {"rope_scaling": {"type": "dynamic"}}, UnsupportedArchitecture, "'dynamic'"),
        (
            released.GEMMA_3_1B,
            {"rope_parameters": {"rope_type": "default"}},
            CheckpointError,
            "an object per layer type",
        ),
        (RELEASED["gpt-oss-20b"], {"num_experts_per_tok": 33}, UnsupportedArchitecture, "33 is more than"),
        (released.PHI_4_MINI, {"partial_rotary_factor": 0.5}, CheckpointError, "must list 32 numbers"),
        (released.PHI_3_MINI_4K, {"rope_scaling": "no"}, CheckpointError, "must be an object"),
        (released.COMMAND_R7B, {"logit_scale": 0}, CheckpointError, "`logit_scale` must be a positive"),
    ],
)
def test_refusals_of_one_family(
    raw: dict[str, Any], changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        parse_config(raw | changes)


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
    folder(tmp_path, json.dumps(small("llama")), "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no .safetensors weights \(only pytorch_model.bin\)"):
        load_config(tmp_path)


def test_generation_config_decides_the_end_of_sequence(tmp_path: Path) -> None:
    folder(tmp_path, json.dumps(small("llama", eos_token_id=2)), "model.safetensors")
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_config(tmp_path).eos_token_ids == (5, 6)


@pytest.mark.parametrize("name", ["families", "config", "kv_specs", "fingerprint"])
def test_free_of_torch(name: str) -> None:
    # Who keeps which tokens, which specs are cut by, is asked in arrays of positions.
    heavy = {"torch"} if name == "kv_specs" else {"torch", "numpy"}
    code = f"import rayk.models.{name}, sys; assert not {heavy!r} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
