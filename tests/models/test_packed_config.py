"""config.json's settings of releases in packed integers, and of nvidia-modelopt's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayk.models.families import read_config
from rayk.models.families.quantisation import parse_quantisation
from rayk.models.families.raw import RawConfig
from rayk.models.formats import Awq, Fp8, Gptq, Nvfp4, PackQuantized, Quantisation, WeightFormat
from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from tests.models import released

WEIGHT = "model.layers.3.mlp.experts.7.down_proj.weight"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
NVIDIA = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def parsed(settings: dict[str, Any]) -> Quantisation:
    found = parse_quantisation(RawConfig({"quantization_config": settings}, "config.json"))
    assert found is not None
    return found


def packed(bits: int = 4, **weights: Any) -> dict[str, Any]:
    """Settings as RedHatAI's releases have them."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("settings", "form", "text"),
    [
        (GPTQ, Gptq(4, 128), "gptq int4, groups of 128"),
        (GPTQ | {"group_size": -1, "desc_act": True}, Gptq(4, None, ordered=True), "gptq int4, a scale per"),
        (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, Gptq(8, 128, 2), "gptq int8, groups of 128"),
        (AWQ | {"version": "GEMM", "zero_point": True}, Awq(128), "awq int4, groups of 128"),
        (packed(), PackQuantized(4, 128), "pack-quantized int4, groups of 128"),
        (packed(8, strategy="channel", group_size=None), PackQuantized(8, None), "pack-quantized int8"),
        (packed(symmetric=False), PackQuantized(4, 128, symmetric=False), "pack-quantized int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, Nvfp4("modelopt"), "nvfp4"),
        ({"quant_method": "modelopt"} | NVIDIA, Fp8((None, None), "static"), "fp8, a scale per tensor"),
    ],
)
def test_settings_name_their_format(settings: dict[str, Any], form: WeightFormat, text: str) -> None:
    found = parsed(settings)
    assert found.format_of(WEIGHT) == form
    assert found.text.startswith(text)


def test_gptq_sets_modules_apart() -> None:
    """As gptqmodel's QuantizeConfig.to_dict writes it."""
    dynamic: dict[str, Any] = {"-:(?i).*K_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}}
    found = parsed(GPTQ | {"dynamic": dynamic | {r"model\.layers\.0\.": {"group_size": 32}}})
    assert found.format_of(WEIGHT) == Gptq(8, 64)
    assert found.format_of("model.layers.0.mlp.up_proj.weight") == Gptq(4, 32)
    assert found.format_of("model.layers.10.mlp.up_proj.weight") == Gptq(4, 128)
    # 4 bits, and per group of 128 a float16 and a packed zero point; a key is plain.
    assert found.stored_bytes("model.layers.1.self_attn.q_proj.weight", (64, 256), 2) == 64 * (
        128 + 2 * 2 + 1
    )
    assert found.stored_bytes("model.layers.1.self_attn.k_proj.weight", (64, 256), 2) == 64 * 256 * 2


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (GPTQ | {"bits": 3}, "packed integers of 3 bits are not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq in the format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "gptq in the format 'marlin'"),
        (GPTQ | {"pack_dtype": "int16"}, "`pack_dtype` 'int16'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, "packed integers of 2 bits"),
        (AWQ | {"version": "gemv"}, "awq with `version` 'gemv'"),
        (AWQ | {"zero_point": False}, "awq without zero points"),
        (AWQ | {"bits": 8}, "awq with `bits` 8"),
        (packed(3), "weights of 3-bit int"),
        (packed() | {"format": "marlin-24"}, "integers in the `format` 'marlin-24'"),
        (packed() | {"format": "int-quantized"}, "integers in the `format` 'int-quantized'"),
        (packed(strategy="tensor"), "integers with `strategy` 'tensor'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "`quant_algo` 'W4A16_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 in groups of 32"),
    ],
)
def test_what_is_not_read_is_refused_by_name(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=match):
        parsed(settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (GPTQ | {"group_size": 0}, "`group_size` must be a positive integer"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "no regular expression"),
        (GPTQ | {"dynamic": ["lm_head"]}, "`dynamic` must map patterns to objects"),
        ({"quant_method": "gptq"}, "`bits` is missing"),
        (packed(group_size="128"), "`group_size` must be a positive integer"),
    ],
)
def test_what_means_nothing_is_named(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        parsed(settings)


def test_modelopt_leaves_modules_plain() -> None:
    excluded = {"quant_algo": "FP8", "exclude_modules": ["*.layers.[12].*", "*q_proj"], "ignore": ["*o_proj"]}
    found = parsed({"quant_method": "modelopt", **excluded})
    for layer, part, is_plain in ((1, "k", True), (3, "q", True), (3, "o", True), (3, "k", False)):
        num_bytes = found.stored_bytes(f"model.layers.{layer}.self_attn.{part}_proj.weight", (8, 8), 2)
        assert num_bytes == (8 * 8 * 2 if is_plain else 8 * 8 + 4), (layer, part)


def test_older_exports_of_modelopt_say_it_in_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(released.GEMMA_2_2B))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(NVIDIA))
    found = read_config(tmp_path).quantisation
    assert found is not None
    assert found.format_of(WEIGHT) == Fp8((None, None), "static")
