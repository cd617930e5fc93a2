"""Pieces of packed integers, every cut of them, against what gptqmodel, autoawq, compressed-tensors and
modelopt packed and dequantised (packed/), and against the oracle's reading in float64: equal to the bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor, PackedQuantizationCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rayk.models.families.quantisation import parse_quantisation
from rayk.models.families.raw import RawConfig
from rayk.models.formats import Awq, Gptq, Nvfp4, PackQuantized, Quantisation, Scheme, WeightFormat
from rayk.models.formats import integers as integer_formats
from rayk.models.formats import nvfp4 as nvfp4_format
from rayk.models.weights import HeaderReader, WeightReader
from rayk.oracle import packed
from rayk.types.errors import CheckpointError
from tests.markers import one_per

PACKED = Path(__file__).parent / "packed"
MODULE = "model.layers.0.mlp.down_proj."
NAME = MODULE + "weight"
SHAPE = (32, 96)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack fixtures in several chunks, as matrices of released sizes are."""
    monkeypatch.setattr(integer_formats, "CHUNK_COLUMNS", 20)
    monkeypatch.setattr(nvfp4_format, "CHUNK_ROWS", 12)


def fixture(name: str) -> Tensors:
    return load_file(PACKED / f"{name}.safetensors")


def fact(name: str, key: str = "config") -> dict[str, Any]:
    with safe_open(PACKED / f"{name}.safetensors", "pt") as opened:
        found: dict[str, Any] = json.loads(opened.metadata()[key])
    return found


def parsed(settings: dict[str, Any]) -> Quantisation:
    found = parse_quantisation(RawConfig({"quantization_config": settings}, "config.json"))
    assert found is not None
    return found


def save(folder: Path, tensors: Tensors) -> Path:
    save_file({MODULE + key: tensor for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def reader(folder: Path, tensors: Tensors, form: WeightFormat) -> WeightReader:
    return WeightReader(save(folder, tensors), str, Quantisation(method="any", schemes=(Scheme(form),)))


def cuts(size: int) -> Iterator[range]:
    """Runs within words and groups, on their borders, and of whole sides."""
    for start, stop in itertools.combinations(sorted({0, 7, 8, 33, size - 1, size} & {*range(size + 1)}), 2):
        yield range(start, stop)


def every_cut_equals(
    opened: WeightReader, expected: torch.Tensor, stored: torch.Tensor | None = None
) -> None:
    """`expected`: the matrix, rounded once to float32; `stored`: as a library rounds it to its own dtype."""
    shape = (expected.shape[0], expected.shape[1])
    for rows, columns in itertools.product(cuts(shape[0]), (None, *cuts(shape[1]))):
        found = opened.read(NAME, shape, rows, columns)
        side = slice(None) if columns is None else slice(columns.start, columns.stop)
        part = slice(rows.start, rows.stop), side
        assert found.dtype == torch.float32
        assert torch.equal(found, expected[part].float()), (rows, columns)
        if stored is not None:
            assert torch.equal(found.to(stored.dtype), stored[part]), (rows, columns)


def in_numpy(tensors: Tensors) -> dict[str, Any]:
    return {key: tensor.numpy() for key, tensor in tensors.items()}


def grouped(settings: dict[str, Any]) -> int | None:
    return None if settings["group_size"] == -1 else settings["group_size"]


@one_per()
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", ["gptq_order", "gptq_sym", "gptq_asym", "gptq_channel", "gptq_8"])
def test_every_cut_of_gptq_is_that_of_gptqmodel(tmp_path: Path, name: str, version: int) -> None:
    tensors, settings = fixture(name), fact(name)
    stored, second = tensors.pop("expected"), tensors.pop("qzeros_v2")
    if version == 2:
        tensors["qzeros"], settings["checkpoint_format"] = second, "gptq_v2"
    expected = torch.from_numpy(
        packed.read_gptq(in_numpy(tensors), settings["bits"], grouped(settings), version)
    )
    with WeightReader(save(tmp_path, tensors), str, parsed(settings)) as opened:
        every_cut_equals(opened, expected, stored)
        assert not opened.unread


def test_every_cut_of_awq_is_that_of_autoawq(tmp_path: Path) -> None:
    tensors, settings = fixture("awq"), fact("awq")
    stored = tensors.pop("expected")
    expected = torch.from_numpy(packed.read_awq(in_numpy(tensors), settings["group_size"]))
    with WeightReader(save(tmp_path, tensors), str, parsed(settings)) as opened:
        every_cut_equals(opened, expected, stored)
        assert not opened.unread


def test_groups_in_the_order_of_activations_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    tensors = fixture("packed_order")
    stored = tensors.pop("expected")
    expected = torch.from_numpy(packed.read_packed(in_numpy(tensors), 4, 32))
    with WeightReader(save(tmp_path, tensors), str, parsed(fact("packed_order"))) as opened:
        every_cut_equals(opened, expected, stored)
        assert not opened.unread


def weights(strategy: str, bits: int, *, symmetric: bool) -> QuantizationArgs:
    size = 32 if strategy == "group" else None
    return QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=size
    )


@one_per()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("strategy", "shape"), [("group", (30, 96)), ("channel", (30, 93))])
def test_every_cut_of_packed_is_that_of_compressed_tensors(
    tmp_path: Path, strategy: str, shape: tuple[int, int], bits: int, symmetric: bool, dtype: torch.dtype
) -> None:
    """Neither side of some is a multiple of a word."""
    args = weights(strategy, bits, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(0)
    groups = shape[1] // 32 if strategy == "group" else 1
    half = 1 << bits - 1
    given = {
        "weight": torch.randn(shape, generator=generator).to(dtype),
        "weight_scale": ((torch.rand(shape[0], groups, generator=generator) + 0.5) / half).to(dtype),
    }
    if not symmetric:
        points = torch.randint(-half, half, (shape[0], groups), generator=generator)
        given["weight_zero_point"] = points.to(torch.int8)
    tensors = PackedQuantizationCompressor.compress(given, scheme)
    stored = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    wide = {key: tensor.double() if key == "weight_scale" else tensor for key, tensor in tensors.items()}
    expected = PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
    assert expected.dtype == torch.float64
    form = PackQuantized(bits, args.group_size, symmetric)
    with reader(tmp_path, tensors, form) as opened:
        every_cut_equals(opened, expected, stored)
        assert not opened.unread


@pytest.mark.parametrize("bits", [4, 8])
def test_what_the_oracle_packs_it_reads(bits: int) -> None:
    generator = np.random.default_rng(0)
    weight, groups = generator.standard_normal(SHAPE), packed.neighbours(SHAPE[1], 32)
    codes, zeros, scales = packed.affine(weight, bits, groups, symmetric=False)
    zeros[::3] = 0
    expected = packed.scaled(codes, zeros, scales, groups)
    for version in (1, 2):
        tensors = packed.write_gptq(codes, zeros, scales, bits, groups=groups, version=version)
        assert np.array_equal(packed.read_gptq(tensors, bits, 32, version), expected)
    if bits == 4:
        assert np.array_equal(packed.read_awq(packed.write_awq(codes, zeros, scales), 32), expected)


def test_the_oracle_packs_as_gptqmodel_and_autoawq_do() -> None:
    """From the codes that the fixtures hold: the same words."""
    for name in ("gptq_asym", "gptq_order", "gptq_8"):
        settings, tensors = fact(name), in_numpy(fixture(name))
        bits, groups = settings["bits"], tensors["g_idx"].astype(np.int64)
        codes = packed.unpack(tensors["qweight"].T, bits, SHAPE[1])
        zeros = packed.unpack(tensors["qzeros_v2"], bits, SHAPE[0]).T
        written = packed.write_gptq(codes, zeros, tensors["scales"].T, bits, groups=groups)
        assert all(np.array_equal(tensors[key], value) for key, value in written.items())
    tensors = in_numpy(fixture("awq"))
    codes, zeros = (
        packed.unpack(tensors[key], 4, SHAPE[0], packed.AWQ_ORDER).T for key in ("qweight", "qzeros")
    )
    written = packed.write_awq(codes, zeros, tensors["scales"].T)
    assert all(np.array_equal(tensors[key], value) for key, value in written.items())


def test_a_piece_reads_the_words_that_it_needs(tmp_path: Path) -> None:
    """Outputs 8 to 16 and inputs 32 to 64 of four bits: a word's width of outputs, a group of inputs."""
    tensors = fixture("gptq_asym")
    with reader(tmp_path, tensors, Gptq(4, 32)) as opened:
        opened.read(NAME, SHAPE, range(8, 16), range(32, 64))
        # Codes, scales, a word of zero points and the groups of the columns.
        assert opened.total_read_bytes == 8 * 32 // 2 + 8 * 2 + 4 + 32 * 4
    with reader(tmp_path, fixture("awq"), Awq(32)) as opened:
        opened.read(NAME, SHAPE, range(8, 16), range(32, 64))
        assert opened.total_read_bytes == 8 * 32 // 2 + 8 * 2 + 4
        assert opened.max_read_bytes == opened.total_read_bytes + 8 * 32 * 4


@pytest.mark.parametrize("name", ["gptq_order", "awq", "packed_order"])
def test_headers_alone_say_what_is_read(tmp_path: Path, name: str) -> None:
    tensors = fixture(name)
    tensors = {key: tensors[key] for key in tensors if key not in ("expected", "qzeros_v2")}
    with HeaderReader(save(tmp_path, tensors), str, parsed(fact(name))) as opened:
        assert opened.read(NAME, SHAPE, range(3, 9), range(7, 40)).shape == (6, 33)
        assert not opened.unread


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = fixture("gptq_order")
    with (
        reader(tmp_path, tensors, Gptq(4, 16)) as opened,
        pytest.raises(CheckpointError, match=r"qzeros has shape \[3, 4\], config.json asks for \[6, 4\]"),
    ):
        opened.require(NAME, SHAPE)
    with (
        reader(tmp_path, tensors, Gptq(8, 32)) as opened,
        pytest.raises(CheckpointError, match=r"qweight has shape \[12, 32\]"),
    ):
        opened.require(NAME, SHAPE)
    wrong = tensors | {"g_idx": tensors["g_idx"] + 1}
    with (
        reader(tmp_path, wrong, Gptq(4, 32)) as opened,
        pytest.raises(CheckpointError, match="g_idx names groups 1 to 3 of 3"),
    ):
        opened.read(NAME, SHAPE)
    del tensors["g_idx"]
    with (
        reader(tmp_path, tensors, Gptq(4, 32, ordered=True)) as opened,
        pytest.raises(CheckpointError, match="g_idx is missing"),
    ):
        opened.require(NAME, SHAPE)
    with (
        reader(tmp_path, fixture("awq"), Awq(32)) as opened,
        pytest.raises(CheckpointError, match="cannot be stored in packed integers"),
    ):
        opened.require(NAME, (30, 96))


def test_every_cut_of_nvfp4_is_that_of_modelopt(tmp_path: Path) -> None:
    tensors = fixture("modelopt_nvfp4")
    stored = tensors.pop("expected")
    scales, scale = tensors["weight_scale"].double().numpy(), float(tensors["weight_scale_2"])
    reference = packed.read_nvfp4(tensors["weight"].numpy(), scales, scale)
    assert torch.equal(torch.from_numpy(reference.astype(np.float32)), stored)
    with WeightReader(save(tmp_path, tensors), str, parsed(fact("modelopt_nvfp4"))) as opened:
        every_cut_equals(opened, stored)
        assert not opened.unread


def test_every_cut_of_nvfp4_is_that_of_compressed_tensors(tmp_path: Path) -> None:
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(0)
    given = {
        "weight": torch.randn(12, 64, generator=generator),
        "weight_scale": torch.rand(12, 4, generator=generator) * 200 + 100,
        "weight_global_scale": torch.tensor([341.0]),
    }
    tensors = NVFP4PackedCompressor.compress(given, scheme)
    # The library multiplies in float32 and returns bfloat16.
    stored = NVFP4PackedCompressor.decompress(tensors, scheme)["weight"]
    codes = unpack_fp4_from_uint8(tensors["weight_packed"], 12, 64).float()
    scales, scale = tensors["weight_scale"].float(), tensors["weight_global_scale"]
    expected = dequantize(codes, scales, args=args, global_scale=scale, dtype=torch.float32)
    with reader(tmp_path, tensors, Nvfp4("compressed-tensors")) as opened:
        every_cut_equals(opened, expected, stored)
        assert not opened.unread


@pytest.mark.parametrize("name", ["modelopt_fp8", "modelopt_fp8_channel"])
def test_every_cut_of_fp8_is_that_of_modelopt(tmp_path: Path, name: str) -> None:
    tensors = fixture(name)
    expected = tensors.pop("expected")
    for settings in (fact(name), {"quant_method": "modelopt"} | fact(name, "hf_quant_config")):
        with WeightReader(save(tmp_path, tensors), str, parsed(settings)) as opened:
            every_cut_equals(opened, expected)
            assert not opened.unread
