"""`quantization_config` of fp8, mxfp4 and compressed-tensors: what is read, what is refused, and which
modules stay plain, against transformers and compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.utils.match import match_name
from transformers.quantizers.quantizers_utils import should_convert_module

from rayk.models.families import parse_config
from rayk.models.formats import Fp8, Mxfp4, Quantisation
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.models.released import small

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": FLOAT8 | weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **others}


def group(**others: Any) -> dict[str, Any]:
    settings = compressed({"strategy": "tensor"})
    settings["config_groups"]["group_0"] |= others
    return settings


def read(settings: dict[str, Any]) -> Quantisation:
    found = parse_config(small("llama", quantization_config=settings)).quantisation
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Fp8((128, 64), "group")),
        ({"quant_method": "fp8", "weight_block_size": None}, Fp8((None, None), "token")),
        ({"quant_method": "fp8", "fmt": "e4m3"}, Fp8((None, None), "token", "F8_E4M3")),
        ({"quant_method": "fp8", "fmt": "e5m2"}, Fp8((None, None), "token", "F8_E5M2")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Fp8((None, None), "static")),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, Fp8((None, None), None)),
        ({"quant_method": "mxfp4"}, Mxfp4()),
        (compressed({"strategy": "tensor"}), Fp8((None, None))),
        (compressed({"strategy": "channel"}), Fp8((1, None))),
        (compressed({"strategy": "block", "block_structure": [128, 128]}), Fp8((128, 128))),
        (compressed({"strategy": "channel"}, sparsity_config={"format": "dense"}), Fp8((1, None))),
    ],
)
def test_formats(settings: dict[str, Any], form: Any) -> None:
    assert read(settings).format_of("model.layers.0.mlp.up_proj.weight") == form


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        (3, CheckpointError, "`quantization_config` must be an object, not 3"),
        ({}, UnsupportedArchitecture, "`quant_method` None"),
        ({"quant_method": ["fp8"]}, UnsupportedArchitecture, "mend: one of fp8, mxfp4"),
        ({"quant_method": "fp8", "weight_block_size": 128}, CheckpointError, "two integers, not 128"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, CheckpointError, "integers from 1"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, CheckpointError, "integers from 1"),
        ({"quant_method": "fp8", "modules_to_not_convert": "x"}, CheckpointError, "a list of names"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, CheckpointError, "no regular expression"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, UnsupportedArchitecture, "`fmt` 'e3m4'"),
        ({"quant_method": "fp8", "fmt": ["e4m3"]}, UnsupportedArchitecture, r"`fmt` \['e4m3'\]"),
        ({"quant_method": "fp8", "scale_fmt": "foo"}, UnsupportedArchitecture, "`scale_fmt` 'foo'"),
        ({"quant_method": "fp8", "activation_scheme": "foo"}, UnsupportedArchitecture, "_scheme` 'foo'"),
        ({"quant_method": "fp8", "activation_scheme": 7}, UnsupportedArchitecture, "`activation_scheme` 7"),
        ({"quant_method": "compressed-tensors"}, CheckpointError, "`config_groups` must map names"),
        (compressed({"strategy": "group"}), UnsupportedArchitecture, "`strategy` 'group'"),
        (compressed({"num_bits": 3}), UnsupportedArchitecture, "weights of 3-bit float"),
        (compressed({"num_bits": [4]}), UnsupportedArchitecture, r"weights of \[4\]-bit float"),
        (compressed({"type": {}}), UnsupportedArchitecture, "weights of 8-bit {}"),
        (compressed({}, config_groups={}), CheckpointError, "`config_groups` must map names"),
        (group(targets=[]), CheckpointError, "group 'group_0' has no `targets`"),
        (group(input_activations=[FLOAT8]), CheckpointError, "`input_activations` that are no object"),
        (compressed({"strategy": "block"}), CheckpointError, "`block_structure` must be two integers"),
        (compressed({}, sparsity_config={"format": "sparse-24-bitmask"}), UnsupportedArchitecture, "spars"),
        (compressed({}, transform_config={"R1": {}}), UnsupportedArchitecture, "`transform_config`"),
    ],
)
def test_refusals(settings: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        parse_config(small("llama", quantization_config=settings), where="/models/x/config.json")
    assert "/models/x/config.json" in str(caught.value)


NAMES = (
    "lm_head",
    "model.embed_tokens",
    *(
        f"model.layers.{i}.{part}"
        for i in (1, 11)
        for part in ("mlp.gate", "mlp.gate_proj", "self_attn.q_proj")
    ),
)
PATTERNS = ("lm_head", "model.layers.1", "model.layers.*.mlp.gate", "q_proj", "mlp.gate", "layers.1.mlp.gate")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_modules_stay_plain_as_transformers_says(pattern: str) -> None:
    found = read({"quant_method": "fp8", "modules_to_not_convert": [pattern]})
    for name in NAMES:
        is_plain = found.stored_bytes(f"{name}.weight", (64, 64), 2) == 64 * 64 * 2
        is_candidate = ".layers." in name and not name.endswith(".gate")
        if is_candidate:
            assert is_plain == (not should_convert_module(name, [pattern])), name


LAYERS = "|".join(map(str, range(61)))
RELEASED = (
    "re:.*gate$",
    "re:model.layers.1.mlp.*",
    "re:lm_head",
    r"re:model\.layers\.(0|1|2)\..*",
    rf"re:.*layers\.({LAYERS})\..*(q|k|v|o)_proj.*",
    "re:(?i).*MLP.*",
    r"re:^(?!.*self_attn\.(?:q_proj|k_proj)$).*$",
    "re:.*model.*layers.*self_attn.*q.*proj.*",
    r"re:(?:.*\.)?q_proj",
    r"re:model\.layers\.(?P<layer>\d)(?P=layer).*",
    r"re:model\.layers\.(\d)\1.*",
)


@pytest.mark.parametrize("pattern", [*NAMES, *RELEASED])
def test_modules_stay_plain_as_compressed_tensors_says(pattern: str) -> None:
    found = read(compressed({"strategy": "tensor"}, ignore=[pattern]))
    for name in NAMES:
        is_plain = found.stored_bytes(f"{name}.weight", (64, 64), 2) == 64 * 64 * 2
        if ".layers." in name and not name.endswith(".gate"):
            assert is_plain == match_name(name, pattern), name


def test_patterns_that_cannot_be_joined_count_each() -> None:
    """Flags behind a start, equal names of groups and numbers of groups would be errors, or others."""
    patterns = ["re:(?i).*GATE_PROJ", r"re:.*(?P<a>x)(?P=a)", r"re:(?P<a>y)", r"re:model\.layers\.(\d)\1.*"]
    found = read(compressed({"strategy": "tensor"}, ignore=["lm_head", *patterns]))
    for name in NAMES:
        is_plain = found.stored_bytes(f"{name}.weight", (64, 64), 2) == 64 * 64 * 2
        if ".layers." in name and not name.endswith(".gate"):
            assert is_plain == any(match_name(name, pattern) for pattern in patterns), name


SLOW = (
    ("(([a-z.0-9_]+)+)+!", "repeat of a group"),
    ("(a|a)*!", "repeat of a group"),
    ("(?:a{0,50}){0,50}!", "repeat of a group"),
    (".*" * 9 + "!", "too many ways"),
    ("[a-z]{0,9}" * 9 + "!", "too many ways"),
    ("(.|[a-z])" * 40 + "!", "too many ways"),
    ("(m|M)" * 40 + "(?i:!)", "too many ways"),
    ("(^|m)" * 40 + "!", "too many ways"),
    ("(a|ab*)" * 40 + "!", "too many ways"),
    ("[a-z]?" * 40 + "!", "too many ways"),
    ("(?:a?)?" * 40 + "!", "too many ways"),
    ("a{99999999999}", "no regular expression"),
    ("(" * 5000 + ")" * 5000, "characters, more than 1000"),
    ("x" * 1001, "characters, more than 1000"),
    ("(?#a)b", "is not supported"),
)


@pytest.mark.parametrize(("pattern", "match"), SLOW, ids=[pattern[:20] for pattern, _ in SLOW])
def test_patterns_that_could_take_long_are_refused(pattern: str, match: str) -> None:
    for settings, key in (
        (compressed({"strategy": "tensor"}, ignore=[f"re:{pattern}"]), "ignore"),
        (group(targets=[f"re:{pattern}"]), "targets"),
        ({"quant_method": "fp8", "modules_to_not_convert": [pattern]}, "modules_to_not_convert"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {f"-:{pattern}": {}}}, "dynamic"),
    ):
        with pytest.raises(CheckpointError, match=f"`{key}` holds .*{match}"):
            read(settings)


def test_the_first_group_that_matches_counts() -> None:
    first = {"targets": [r"re:.*self_attn\..*"], "weights": FLOAT8 | {"strategy": "tensor"}}
    settings = compressed({"strategy": "channel"})
    settings["config_groups"] = {"group_1": first, **settings["config_groups"]}
    found = read(settings)
    assert found.format_of("model.layers.0.self_attn.q_proj.weight") == Fp8((None, None))
    assert found.format_of("model.layers.0.mlp.up_proj.weight") == Fp8((1, None))
    assert found.text == "fp8, a scale per tensor; fp8, a scale per channel"
