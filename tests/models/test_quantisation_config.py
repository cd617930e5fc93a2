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


def read(settings: dict[str, Any]) -> Quantisation:
    found = parse_config(small("llama", quantization_config=settings)).quantisation
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Fp8((128, 64), "group")),
        ({"quant_method": "fp8", "weight_block_size": None}, Fp8((None, None), "token")),
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
        ({"quant_method": "compressed-tensors"}, CheckpointError, "`config_groups` must map names"),
        (compressed({"strategy": "group"}), UnsupportedArchitecture, "`strategy` 'group'"),
        (compressed({"num_bits": 3}), UnsupportedArchitecture, "weights of 3-bit float"),
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


@pytest.mark.parametrize("pattern", [*NAMES, "re:.*gate$", "re:model.layers.1.mlp.*", "re:lm_head"])
def test_modules_stay_plain_as_compressed_tensors_says(pattern: str) -> None:
    found = read(compressed({"strategy": "tensor"}, ignore=[pattern]))
    for name in NAMES:
        is_plain = found.stored_bytes(f"{name}.weight", (64, 64), 2) == 64 * 64 * 2
        if ".layers." in name and not name.endswith(".gate"):
            assert is_plain == match_name(name, pattern), name


def test_the_first_group_that_matches_counts() -> None:
    first = {"targets": [r"re:.*self_attn\..*"], "weights": FLOAT8 | {"strategy": "tensor"}}
    settings = compressed({"strategy": "channel"})
    settings["config_groups"] = {"group_1": first, **settings["config_groups"]}
    found = read(settings)
    assert found.format_of("model.layers.0.self_attn.q_proj.weight") == Fp8((None, None))
    assert found.format_of("model.layers.0.mlp.up_proj.weight") == Fp8((1, None))
    assert found.text == "fp8, a scale per tensor; fp8, a scale per channel"
