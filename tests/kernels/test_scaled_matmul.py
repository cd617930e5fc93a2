"""Products of quantised inputs with matrices kept in fp8, against float64 products of what both stand for.

Operands are exact, so what differs is how products are added up and rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayk.kernels.dispatch import implementation
from rayk.kernels.grouped_matmul import grouped_matmul
from rayk.kernels.scaled_matmul import ScaledWeight, can_stack, quantise_inputs, scaled_matmul, stacked_weight
from tests.each import each
from tests.helpers import assert_matches
from tests.markers import gpu, interpreted, thorough

IMPLS = ("reference", pytest.param("triton", marks=interpreted))
OTHER_GPUS = ("sm_89", "sm_100", "gfx942")
E4M3 = torch.float8_e4m3fn
MATRIX, ROW = (0, 0), (1, 0)
"""Blocks of scales; 0 stands for the whole axis."""
FORMS = {
    "blocks": ((128, 128), "group"),
    "small blocks": ((32, 32), "group"),
    "blocks, static": ((128, 128), "static"),
    "matrix": (MATRIX, "token"),
    "matrix, static": (MATRIX, "static"),
    "rows": (ROW, "token"),
    "rows, static": (ROW, "static"),
}


def drawn_weight(num_out: int, num_in: int, form: str, seed: int = 0) -> ScaledWeight:
    """A matrix whose blocks are of very different size, so that no mix-up of scales goes unseen."""
    (rows, columns), inputs = FORMS[form]
    block = (rows or num_out, columns or num_in)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_out, num_in, generator=generator).mul(100).clamp(-448, 448).to(E4M3)
    shape = (-(-num_out // block[0]), -(-num_in // block[1]))
    scales = torch.rand(shape, generator=generator).mul(6).sub(9).exp2()
    return ScaledWeight(values, scales, block, inputs, input_scale=0.01 if inputs == "static" else 1.0)


def drawn_inputs(num_rows: int, num_in: int, dtype: torch.dtype) -> Tensor:
    """Rows and columns of unlike size."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_in, generator=generator)
    return (x * torch.linspace(0.1, 3, num_in) * torch.linspace(1, 4, num_rows)[:, None]).to(dtype)


def exact(x: Tensor, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product in `dtype` of what quantised inputs and the kept matrix stand for."""
    codes, scales = quantise_inputs(x, weight, impl="reference")
    size = weight.block[1] if weight.inputs == "group" else x.shape[1]
    spread = scales.double().repeat_interleave(size, 1)[:, : x.shape[1]]
    inputs = (codes[:, : x.shape[1]].double() * spread).to(dtype)
    out = inputs @ weight.dequantised(dtype).T
    return out if bias is None else out + bias.to(dtype)


def check(x: Tensor, weight: ScaledWeight, bias: Tensor | None, device: str = "cpu", **how: Any) -> None:
    moved = ScaledWeight(
        weight.values.to(device), weight.scales.to(device), weight.block, weight.inputs, weight.input_scale
    )
    found = scaled_matmul(x.to(device), moved, None if bias is None else bias.to(device), **how).cpu()
    assert found.dtype == x.dtype
    assert_matches(found, exact(x, weight, bias, torch.float64), exact(x, weight, bias, x.dtype))


@each("shape, biased", [((5, 200, 300), True), ((40, 130, 256), False), ((1, 256, 1024), True)], ids=str)
@pytest.mark.parametrize("form", [pytest.param(f, marks=[thorough] * (f != "blocks")) for f in FORMS])
@pytest.mark.parametrize("impl", IMPLS)
def test_products_are_those_of_the_dequantised(
    impl: str, form: str, shape: tuple[int, int, int], biased: bool
) -> None:
    """Also where no tile divides rows, outputs or inputs, and where columns are split over programs."""
    num_rows, num_out, num_in = shape
    bias = torch.linspace(-50, 50, num_out) if biased else None
    check(drawn_inputs(num_rows, num_in, torch.float32), drawn_weight(num_out, num_in, form), bias, impl=impl)


@thorough
@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_in_the_interpreter(dtype: torch.dtype) -> None:
    x, weight = drawn_inputs(20, 384, dtype), drawn_weight(130, 384, "blocks")
    check(x, weight, torch.linspace(-50, 50, 130).to(dtype), impl="triton")


@interpreted
@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_columns_are_split_over_programs(num_splits: int) -> None:
    """Also into more splits than there are blocks of columns: some then add nothing."""
    x, weight, bias = drawn_inputs(3, 650, torch.float32), drawn_weight(70, 650, "blocks"), torch.ones(70)
    inputs = quantise_inputs(x, weight)
    found = implementation("scaled_matmul", "triton")(inputs, weight, bias, x.dtype, splits=num_splits)
    assert_matches(found, exact(x, weight, bias, torch.float64), exact(x, weight, bias, x.dtype))


@interpreted
@pytest.mark.parametrize("target", ["sm_80", *(pytest.param(t, marks=thorough) for t in OTHER_GPUS)])
def test_tiles_of_other_gpus(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_80 and gfx942 do not multiply e4m3: values are decoded there. Many rows have larger tiles."""
    from rayk.kernels.scaled_matmul import launch
    from rayk.kernels.target import TARGETS

    monkeypatch.setattr(launch, "current_target", lambda: TARGETS[target])
    for num_rows in (2, 130):
        x, weight = drawn_inputs(num_rows, 256, torch.float32), drawn_weight(200, 256, "blocks")
        check(x, weight, None, impl="triton")


@each("form", ["matrix", "matrix, static", "rows", "rows, static"])
@each("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_product_is_the_references(form: str, dtype: torch.dtype) -> None:
    """torch._scaled_mm, which has not been written here, adds up the same quantised operands."""
    if dtype == torch.float32 and form.startswith("rows"):
        return  # torch rounds to bfloat16 there
    x, weight = drawn_inputs(48, 256, dtype), drawn_weight(64, 256, form)
    check(x, weight, torch.ones(64, dtype=dtype), impl="torch")


def test_a_group_of_inputs_is_quantised_as_the_caches_heads_are() -> None:
    """By hand: the largest of 128 becomes 448, and each group has a scale of its own; the last may be cut."""
    x = torch.zeros(2, 300)
    x[0, 5], x[0, 6], x[0, 200], x[1, 299] = 896.0, -2.0, 56.0, -7.0
    codes, scales = quantise_inputs(x, drawn_weight(8, 300, "blocks"))
    smallest = 2.0**-126
    assert scales.tolist() == [[2.0, 0.125, smallest], [smallest, smallest, 7 / 448]]
    assert codes[0, [5, 6, 200]].float().tolist() == [448.0, -1.0, 448.0]
    assert codes[1, 299].float() == -448.0
    assert codes[:, :300].float().count_nonzero() == 4


def test_stacked_matrices_keep_their_scales() -> None:
    """Borders on blocks keep blocks; others give every row its own scales. Products do not change."""
    x = drawn_inputs(4, 256, torch.float32)
    for sizes, block in (((128, 256, 72), (128, 128)), ((128, 100, 60), (1, 128))):
        parts = [drawn_weight(size, 256, "blocks", seed) for seed, size in enumerate(sizes)]
        whole = stacked_weight(parts)
        assert whole.block == block
        for found, part in zip(whole.dequantised(torch.float64).split(sizes), parts, strict=True):
            torch.testing.assert_close(found, part.dequantised(torch.float64), rtol=0, atol=0)
        check(x, whole, None, impl="reference")
    matrices = [drawn_weight(size, 256, "matrix", size) for size in (40, 24)]
    assert stacked_weight(matrices).block == (1, 256)


@pytest.mark.parametrize(
    "unlike", [{"input_scale": 0.02}, {"inputs": "token", "input_scale": 1.0}, {"block": (128, 64)}], ids=str
)
def test_matrices_whose_inputs_are_quantised_otherwise_are_not_stacked(unlike: dict[str, Any]) -> None:
    """One product quantises its inputs once: another static scale would be lost."""
    first, second = (drawn_weight(128, 256, "blocks, static", seed) for seed in range(2))
    assert can_stack([first, second])
    if "block" in unlike:
        unlike = unlike | {"scales": second.scales.repeat_interleave(2, -1)}
    assert not can_stack([first, replace(second, **unlike)])


def check_groups(
    x: Tensor, parts: list[ScaledWeight], sizes: tuple[int, ...], device: str, **how: Any
) -> None:
    """Rows of x, in groups of these sizes, each times its own matrix; some rows are left over."""
    stacked = replace(
        parts[0],
        values=torch.stack([p.values.view(torch.uint8) for p in parts]).view(E4M3).to(device),
        scales=torch.stack([p.scales for p in parts]).to(device),
    )
    ends = torch.tensor(sizes).cumsum(0).int()
    biases = torch.linspace(-50, 50, parts[0].num_outputs).repeat(len(sizes), 1).to(x.dtype)
    biases *= torch.arange(1, len(sizes) + 1)[:, None]
    found = grouped_matmul(x.to(device), stacked, ends.to(device), biases.to(device), **how)[: sum(sizes)]

    def whole(dtype: torch.dtype) -> Tensor:
        groups = zip(x[: sum(sizes)].split(sizes), parts, biases, strict=True)
        return torch.cat([exact(rows, part, bias, dtype) for rows, part, bias in groups])

    assert_matches(found.cpu(), whole(torch.float64), whole(x.dtype))


@each("sizes", [(0, 5, 0, 30, 1), (40, 40), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "form", ["blocks", *(pytest.param(f, marks=thorough) for f in ("rows", "blocks, static"))]
)
@pytest.mark.parametrize("impl", IMPLS)
def test_each_row_meets_its_groups_matrix(impl: str, form: str, sizes: tuple[int, ...]) -> None:
    parts = [drawn_weight(136, 384, form, seed) for seed in range(len(sizes))]
    check_groups(drawn_inputs(sum(sizes) + 3, 384, torch.float32), parts, sizes, "cpu", impl=impl)


@gpu
@each("num_rows", [1, 16, 64, 1000])
@each("dtype", [torch.bfloat16, torch.float16], ids=str)
@each("impl", ["triton", None])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(7168, 2048), (2112, 7168), (4096, 7168)], ids=str)
def test_on_a_gpu(
    sizes: tuple[int, int], form: str, impl: str | None, dtype: torch.dtype, num_rows: int
) -> None:
    """Matrices of DeepSeek-V3: rows that are no multiple of a block, splits, and as chosen by itself."""
    num_out, num_in = sizes
    x, weight = drawn_inputs(num_rows, num_in, dtype), drawn_weight(num_out, num_in, form)
    check(x, weight, torch.linspace(-50, 50, num_out).to(dtype), "cuda", impl=impl)


@gpu
def test_quantised_inputs_on_a_gpu() -> None:
    """The same bytes as on a CPU, for groups, whole tokens and static scales."""
    for form in FORMS:
        x, weight = drawn_inputs(33, 18432, torch.bfloat16), drawn_weight(8, 18432, form)
        for found, wanted in zip(quantise_inputs(x.cuda(), weight), quantise_inputs(x, weight), strict=True):
            assert torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8)), form


@gpu
@pytest.mark.parametrize("rows", [1, 8, 100, 300])
def test_groups_on_a_gpu(rows: int) -> None:
    """Experts of the size of Qwen3-30B-A3B's, of which some have no rows."""
    sizes = tuple(rows if group % 3 else 0 for group in range(32))
    parts = [drawn_weight(1536, 2048, "blocks", seed) for seed in range(len(sizes))]
    check_groups(drawn_inputs(sum(sizes) + 5, 2048, torch.bfloat16), parts, sizes, "cuda")
