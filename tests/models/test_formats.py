"""Pieces of quantised tensors, every cut of them, against what the formats' own libraries make of the whole:
equal to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rayk.models.formats import (
    Awq,
    Fp8,
    Gptq,
    Mxfp4,
    Nvfp4,
    PackQuantized,
    Quantisation,
    Scheme,
    WeightFormat,
)
from rayk.models.formats import mxfp4 as mxfp4_format
from rayk.models.weights import HeaderReader, WeightReader
from rayk.types.errors import CheckpointError

NAME = "model.layers.0.mlp.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def reader(tmp_path: Path) -> Callable[[WeightFormat, Tensors], WeightReader]:
    def write(form: WeightFormat, tensors: Tensors) -> WeightReader:
        save_file(tensors, tmp_path / "model.safetensors")
        return WeightReader(tmp_path, str, Quantisation(method="any", schemes=(Scheme(form),)))

    return write


def fp8_matrix(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Every finite pattern of bits may occur."""
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    found = values.view(torch.float8_e4m3fn)
    return torch.where(found.float().isnan(), torch.zeros(()), found.float()).to(torch.float8_e4m3fn)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01).to(dtype)


def beside(suffix: str) -> str:
    return NAME.replace("weight", suffix)


def cuts(size: int, step: int) -> Iterator[range]:
    """Runs that begin and end on borders of blocks, beside them, and at a matrix's ends."""
    ends = sorted({0, size, 1, size - 1, *range(step, size, step), *range(step + 1, size, step)})
    for start, stop in itertools.combinations(ends, 2):
        yield range(start, stop)


def theirs(args: dict[str, Any], weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What compressed-tensors makes of it, computing in float32."""
    kind = QuantizationArgs(num_bits=8, type="float", symmetric=True, **args)
    return dequantize(weight, scale.float(), args=kind, dtype=torch.float32)


@pytest.mark.parametrize(
    ("form", "args", "scale"),
    [
        pytest.param(Fp8((4, 8)), None, scales(6, 4), id="blocks"),
        pytest.param(Fp8((4, 8)), None, scales(6, 4).to(torch.bfloat16), id="blocks-bf16"),
        pytest.param(Fp8((32, 32)), None, scales(1, 1), id="blocks-larger-than-it"),
        pytest.param(Fp8((4, 8)), None, scales(6, 4).to(torch.float8_e8m0fnu), id="blocks-powers-of-two"),
        pytest.param(
            Fp8((4, 8)), {"strategy": "block", "block_structure": [4, 8]}, scales(6, 4), id="their-blocks"
        ),
        pytest.param(Fp8((1, None)), {"strategy": "channel"}, scales(22, 1), id="channels"),
        pytest.param(Fp8((1, None)), {"strategy": "channel"}, scales(22), id="flat-channels"),
        pytest.param(Fp8((None, None)), {"strategy": "tensor"}, scales(1), id="tensor"),
        pytest.param(Fp8((None, None)), {"strategy": "tensor"}, scales(), id="tensor-without-axes"),
    ],
)
def test_every_cut_of_fp8_is_that_of_the_library(
    reader: Callable[[WeightFormat, Tensors], WeightReader],
    form: Fp8,
    args: dict[str, Any] | None,
    scale: torch.Tensor,
) -> None:
    shape = (22, 29)  # neither side is a multiple of a block
    weight = fp8_matrix(shape)
    if args is None:
        assert form.block[0] is not None
        expected = _dequantize_fp8_weight(weight, scale.float(), list(form.block), torch.float32)  # type: ignore[arg-type]
    else:
        column = scale.reshape(-1, 1) if args["strategy"] == "channel" else scale
        expected = theirs(args, weight, column)
    suffix = "weight_scale_inv" if args is None else "weight_scale"
    with reader(form, {NAME: weight, beside(suffix): scale, beside("input_scale"): scales()}) as opened:
        for rows in cuts(shape[0], max(4, form.block[0] or 7)):
            for columns in (None, *cuts(shape[1], form.block[1] or 7)):
                found = opened.read(NAME, shape, rows, columns)
                whole = range(shape[1]) if columns is None else columns
                assert found.dtype == torch.float32
                assert torch.equal(found, expected[rows.start : rows.stop, whole.start : whole.stop]), (
                    rows,
                    columns,
                )
        assert not opened.unread


def test_whole_blocks_are_those_of_transformers_loader(
    reader: Callable[[WeightFormat, Tensors], WeightReader],
) -> None:
    """transformers' own loading refuses or misreads a matrix whose last blocks are cut off."""
    weight, scale = fp8_matrix((24, 32)), scales(6, 4)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    with reader(Fp8((4, 8)), {NAME: weight, beside("weight_scale_inv"): scale}) as opened:
        assert torch.equal(opened.read(NAME, (24, 32)), expected)


def test_mxfp4_is_that_of_transformers(
    reader: Callable[[WeightFormat, Tensors], WeightReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4_format, "CHUNK_GROUPS", 10)  # a released expert takes several, too
    experts, inputs, outputs = 5, 96, 7
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, outputs, 3, 16), dtype=torch.uint8, generator=generator)
    # 255 is no number, and in no release.
    exponents = torch.randint(0, 255, (experts, outputs, 3), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    with reader(Mxfp4(), {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": exponents}) as opened:
        for start, stop in itertools.combinations(range(experts + 1), 2):
            found = opened.read(EXPERTS, (experts, inputs, outputs), range(start, stop))
            assert torch.equal(found, expected[start:stop])
        assert not opened.unread


def test_pieces_on_borders_can_be_had_as_stored(
    reader: Callable[[WeightFormat, Tensors], WeightReader],
) -> None:
    weight, scale = fp8_matrix((22, 29)), scales(6, 4)
    with reader(Fp8((4, 8), "group"), {NAME: weight, beside("weight_scale_inv"): scale}) as opened:
        piece = opened.keep(NAME, (22, 29), range(8, 22), range(16, 24))
        assert piece is not None
        assert piece.values.dtype == torch.float8_e4m3fn
        assert torch.equal(piece.values.float(), weight[8:22, 16:24].float())
        assert torch.equal(piece.scales, scale[2:, 2:3])
        assert piece.block == (4, 8)
        assert opened.keep(NAME, (22, 29), range(8), range(1, 8)) is None
        # Rows may be cut anywhere: then each has a scale of its own.
        for rows, block in ((range(8, 21), (4, 8)), (range(9, 21), (1, 8))):
            piece = opened.keep(NAME, (22, 29), rows, range(8, 29))
            assert piece is not None
            assert piece.block == block
            assert torch.equal(
                piece.dequantised(torch.float32), opened.read(NAME, (22, 29), rows, range(8, 29))
            )
    with reader(Fp8((4, 8)), {NAME: weight, beside("weight_scale_inv"): scale}) as opened:
        assert opened.keep(NAME, (22, 29), range(22)) is None, "it says nothing of inputs"


def test_what_a_piece_took_is_told(reader: Callable[[WeightFormat, Tensors], WeightReader]) -> None:
    """A byte per element as stored, four dequantised, and the scales of the blocks it touches."""
    weight, scale = fp8_matrix((22, 29)), scales(6, 4)
    with reader(Fp8((4, 8)), {NAME: weight, beside("weight_scale_inv"): scale}) as opened:
        opened.read(NAME, (22, 29), range(3, 9), range(7, 17))
        assert opened.max_read_bytes == 60 * 5 + 9 * 4
        assert opened.total_read_bytes == 60 + 9 * 4


def test_headers_alone_say_what_is_read(tmp_path: Path) -> None:
    blocks, exponents = torch.zeros(2, 4, 1, 16, dtype=torch.uint8), torch.zeros(2, 4, 1, dtype=torch.uint8)
    stored = {
        NAME: fp8_matrix((4, 4)),
        beside("weight_scale"): scales(4, 1),
        f"{EXPERTS}_blocks": blocks,
        f"{EXPERTS}_scales": exponents,
    }
    save_file(stored, tmp_path / "model.safetensors")
    schemes = (Scheme(Mxfp4(), (r".*experts$",)), Scheme(Fp8((1, None))))
    with HeaderReader(tmp_path, str, Quantisation(method="any", schemes=schemes)) as opened:
        assert opened.read(NAME, (4, 4), range(1, 3)).shape == (2, 4)
        assert opened.read(EXPERTS, (2, 32, 4), range(1)).shape == (1, 32, 4)
        assert not opened.unread


@pytest.mark.parametrize(
    ("form", "tensors", "match"),
    [
        (Fp8((4, 8)), {NAME: fp8_matrix((22, 29))}, "up_proj.weight_scale_inv is missing"),
        (
            Fp8((4, 8)),
            {NAME: fp8_matrix((22, 29)), beside("weight_scale_inv"): scales(6, 3)},
            r"weight_scale_inv has shape \[6, 3\], config.json asks for \[6, 4\]",
        ),
        (
            Fp8((None, None)),
            {NAME: fp8_matrix((22, 29)), beside("weight_scale"): scales(3)},
            r"weight_scale has shape \[3\]",
        ),
        (
            Fp8((1, None)),
            {NAME: fp8_matrix((22, 29)), beside("weight_scale"): torch.ones(22, 1, dtype=torch.int32)},
            "weight_scale has dtype I32",
        ),
        (Mxfp4(), {NAME: fp8_matrix((22, 29))}, "dtype F8_E4M3"),
        (
            Fp8((None, None), values="F8_E5M2"),
            {NAME: fp8_matrix((22, 29)), beside("weight_scale"): scales()},
            "(?s)dtype F8_E4M3.*one of F8_E5M2",
        ),
        (
            Fp8((None, None)),
            {
                NAME: fp8_matrix((22, 29)),
                beside("weight_scale"): scales(),
                beside("weight_scale_inv"): scales(),
            },
            "up_proj.weight has two tensors of scales, .*weight_scale_inv and .*weight_scale",
        ),
    ],
)
def test_files_that_do_not_fit_are_named(
    reader: Callable[[WeightFormat, Tensors], WeightReader], form: WeightFormat, tensors: Tensors, match: str
) -> None:
    with reader(form, tensors) as opened, pytest.raises(CheckpointError, match=match):
        opened.require(NAME, (22, 29))


@pytest.mark.parametrize(
    ("form", "tensors", "shape", "match"),
    [
        (Fp8((4, 8)), {EXPERTS: fp8_matrix((4, 8))[None]}, (1, 4, 8), "of 3 axes is stored in 8-bit floats"),
        (
            Mxfp4(),
            {f"{EXPERTS}_blocks": torch.zeros(1, 4, 1, 16, dtype=torch.uint8)},
            (1, 33, 4),
            "cannot be stored in groups of 32",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_told_with_its_folder(
    reader: Callable[[WeightFormat, Tensors], WeightReader],
    form: WeightFormat,
    tensors: Tensors,
    shape: tuple[int, ...],
    match: str,
) -> None:
    with reader(form, tensors) as opened:
        with pytest.raises(CheckpointError, match=match) as caught:
            opened.require(EXPERTS, shape)
        assert str(opened.folder) in str(caught.value)
        assert caught.value.mend


NAN = float("nan")
HALF, E4M3 = torch.float16, torch.float8_e4m3fn
ZEROS = torch.zeros(2, 1, dtype=torch.int32)
PACK_QUANTIZED = {
    "weight_packed": torch.zeros(8, 2, dtype=torch.int32),
    "weight_scale": scales(8, 2, dtype=HALF),
    "weight_shape": torch.tensor([8, 16]),
}
AWQ = {"qweight": torch.zeros(16, 1, dtype=torch.int32), "qzeros": ZEROS, "scales": scales(2, 8, dtype=HALF)}
GPTQ = {"qweight": torch.zeros(2, 8, dtype=torch.int32), "qzeros": ZEROS, "scales": scales(2, 8, dtype=HALF)}
NVFP4 = {
    "weight": torch.zeros(8, 8, dtype=torch.uint8),
    "weight_scale": scales(8, 1, dtype=E4M3),
    "weight_scale_2": scales(),
}


@pytest.mark.parametrize(
    ("form", "tensors", "suffix"),
    [
        (Fp8((4, 8)), {"weight": fp8_matrix((8, 16)), "weight_scale_inv": scales(2, 2)}, "weight_scale_inv"),
        (Fp8((1, None)), {"weight": fp8_matrix((8, 16)), "weight_scale": scales(8)}, "weight_scale"),
        (PackQuantized(4, 8), PACK_QUANTIZED, "weight_scale"),
        (Awq(8), AWQ, "scales"),
        (Gptq(4, 8), GPTQ, "scales"),
        (Nvfp4("modelopt"), NVFP4, "weight_scale"),
        (Nvfp4("modelopt"), NVFP4, "weight_scale_2"),
    ],
)
@pytest.mark.parametrize("value", [NAN, float("inf"), 0.0])
def test_scales_that_are_not_finite_are_named(
    reader: Callable[[WeightFormat, Tensors], WeightReader],
    form: WeightFormat,
    tensors: Tensors,
    suffix: str,
    value: float,
) -> None:
    """Zeros are: some converters write them for blocks of zeros."""
    stored = {beside(name): tensor for name, tensor in tensors.items()}
    if tensors[suffix].dtype == E4M3 and value:
        value = NAN  # It has no infinity.
    changed = stored[beside(suffix)].float().clone()
    changed.view(-1)[-1] = value
    stored[beside(suffix)] = changed.to(tensors[suffix].dtype)
    with reader(form, stored) as opened:
        if value == 0:
            assert (opened.read(NAME, (8, 16))[-1, -4:] == 0).all()
            return
        with pytest.raises(CheckpointError, match=f"{suffix} holds scales that are infinite") as caught:
            opened.read(NAME, (8, 16))
        assert str(opened.folder) in str(caught.value)
        # Pieces that do not need the scale may be read.
        if changed.ndim == 2:
            assert opened.read(NAME, (8, 16), range(4), range(8)).isfinite().all()


def test_scales_of_kept_matrices_are_checked(reader: Callable[[WeightFormat, Tensors], WeightReader]) -> None:
    stored = {
        NAME: fp8_matrix((4, 4)),
        beside("weight_scale"): scales(),
        beside("input_scale"): scales() * NAN,
    }
    with reader(Fp8((None, None), "static"), stored) as opened:
        with pytest.raises(CheckpointError, match="input_scale holds scales that are infinite") as caught:
            opened.keep(NAME, (4, 4), range(4))
        assert str(opened.folder) in str(caught.value)


def test_mxfp4_has_a_scale_that_is_no_number(reader: Callable[[WeightFormat, Tensors], WeightReader]) -> None:
    blocks, exponents = torch.zeros(2, 4, 1, 16, dtype=torch.uint8), torch.zeros(2, 4, 1, dtype=torch.uint8)
    exponents[1, 3] = 255
    with reader(Mxfp4(), {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": exponents}) as opened:
        assert opened.read(EXPERTS, (2, 32, 4), range(1)).shape == (1, 32, 4)
        with pytest.raises(CheckpointError, match="down_proj_scales holds 255"):
            opened.read(EXPERTS, (2, 32, 4))


def test_plain_tensors_stay_plain(reader: Callable[[WeightFormat, Tensors], WeightReader]) -> None:
    weight = torch.rand(22, 29).to(torch.bfloat16)
    with reader(Fp8((4, 8)), {NAME: weight}) as opened:
        assert torch.equal(opened.read(NAME, (22, 29), range(3, 5)), weight[3:5])
        assert opened.max_read_bytes == 2 * 29 * 2
