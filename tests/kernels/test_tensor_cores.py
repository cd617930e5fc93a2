"""Tensor cores cut float32 operands down to tf32: kernels stay as right as their inputs allow.

Triton's interpreter multiplies float32 as it is; with the fixture `tensor_cores` it cuts as they do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from rayk.kernels.gated_delta_rule.tiles import DeltaTiles
from rayk.kernels.gated_delta_rule.triton import round_tf32
from rayk.kernels.segments import Segments
from tests.kernels import state_cases, test_gated_delta_rule
from tests.kernels.cases import make_batch
from tests.kernels.conftest import TensorCores
from tests.kernels.state_cases import SSD, Op, Tensors, World
from tests.kernels.test_gated_delta_rule import DELTA
from tests.kernels.test_mla_attention import make_latents
from tests.kernels.test_triton import check as check_attention
from tests.markers import interpreted

pytestmark = interpreted


@triton.jit
def rounding_kernel(x, out, N: tl.constexpr, PRECISION: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, round_tf32(tl.load(x + o), PRECISION))


@triton.jit
def keep(x, PRECISION: tl.constexpr):
    return x


def operand(dtype: torch.dtype) -> torch.dtype | None:
    """Of computed operands, as on a GPU; the interpreter has no bfloat16."""
    return torch.float16 if dtype == torch.float16 else None


def call_ssd(tokens: Tensors, constants: Tensors, state: Tensor, segments: Segments, impl: str) -> Tensor:
    """With a GPU's chunks."""
    from rayk.kernels.ssd_scan.launch import ChunkTiles, ssd_scan_triton

    tiles = ChunkTiles(16, 16, 32, 32, 16, operand=operand(tokens["x"].dtype))
    own = partial(ssd_scan_triton, tiles=tiles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_cases, "ssd_scan", lambda *arguments, impl: own(*arguments))
        return SSD.call(tokens, constants, state, segments, impl)


def call_delta(tokens: Tensors, *rest: Any) -> Tensor:
    tiles = DeltaTiles(16, 32, precision="tf32", operand=operand(tokens["x"].dtype))
    return test_gated_delta_rule.call(tokens, *rest, tiles=tiles)


CHUNKS = (
    replace(SSD, unit_shape=(2, 32, 32), call=call_ssd),
    replace(DELTA, unit_shape=(2, 16, 16), call=call_delta),
)
each_op = pytest.mark.parametrize("op", CHUNKS, ids=[op.name for op in CHUNKS])


def run(op: Op, dtype: torch.dtype = torch.float16) -> None:
    """More than one chunk, also of one that goes on; then both at once, and one with a single token."""
    world = World(op, [65, 40], 1000, dtype, "chunks")
    world.step([(0, 60)])
    world.step([(0, 4), (1, 38)])
    world.step([(0, 1), (1, 2)])
    world.finish(tight=False)


@each_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_are_as_near_as_the_inputs(op: Op, dtype: torch.dtype, tensor_cores: TensorCores) -> None:
    run(op, dtype)
    assert tensor_cores.lost == 0
    assert (tensor_cores.products > 0) == (op.name == "gated_delta_rule")


def test_what_is_not_rounded_is_found(tensor_cores: TensorCores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayk.kernels.gated_delta_rule.triton.round_tf32", keep)
    run(CHUNKS[1])
    assert tensor_cores.lost > 0


@pytest.mark.parametrize("cuts_all", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("kind", ["attention", "latents"])
def test_attention_in_float32_is_not_cut(kind: str, cuts_all: bool, tensor_cores: TensorCores) -> None:
    """Cut, its products would be found."""
    from triton._C.libtriton import ir

    if cuts_all:
        tensor_cores.precisions.add(ir.INPUT_PRECISION.IEEE)
    requests = ((1, 30), (5, 21))

    def check() -> None:
        if kind == "latents":
            latents = make_latents(requests, num_heads=3)
            latents.check(latents.run("triton", "cpu"), "latents")
        else:
            batch = make_batch(requests, kv_index=(0, 0, 1))
            check_attention(batch, "cpu", "attention")

    if cuts_all:
        with pytest.raises(AssertionError, match="RMS error"):
            check()
    else:
        check()
    assert (tensor_cores.lost > 0) == cuts_all


def test_rounding_is_to_the_nearest_and_keeps_what_is_not_finite() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-32, 32)
    x[:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    x.view(torch.int32)[4:6] = torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32)  # other NaN
    mantissa, exponent = torch.frexp(x.double())
    nearest = torch.ldexp((mantissa * 2**11).round(), exponent - 11)
    for precision, expected in (("tf32", nearest), ("ieee", x.double())):
        out = torch.empty_like(x)
        rounding_kernel[1,](x, out, N=64, PRECISION=precision)
        assert torch.equal(out.double().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), precision
