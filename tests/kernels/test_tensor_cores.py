"""Tensor cores cut float32 operands down to tf32: state kernels stay as right as 16-bit inputs allow.

Triton's interpreter multiplies float32 as it is; here it cuts as they do.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from rayk.kernels.gated_delta_rule.tiles import DeltaTiles
from rayk.kernels.segments import Segments
from rayk.kernels.ssd_scan.triton import round_tf32
from tests.kernels import state_cases
from tests.kernels.state_cases import SSD, Op, Tensors, World
from tests.kernels.test_gated_delta_rule import DELTA
from tests.kernels.test_gated_delta_rule import call as call_delta
from tests.markers import interpreted

pytestmark = interpreted
TF32_BITS = np.uint32(0xFFFFE000)


@pytest.fixture
def cutting(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Products at tf32 drop the 13 last bits of float32 operands; so do others that are added here."""
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    precisions = {ir.INPUT_PRECISION.TF32}

    create_dot = InterpreterBuilder.create_dot

    def cut(operand: Any) -> Any:
        assert operand.data.dtype == np.float32
        return TensorHandle((operand.data.view(np.uint32) & TF32_BITS).view(np.float32), operand.dtype)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if precision in precisions:
            a, b = cut(a), cut(b)
        return create_dot(self, a, b, d, precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    return precisions


@triton.jit
def rounding_kernel(x, out, N: tl.constexpr, PRECISION: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, round_tf32(tl.load(x + o), PRECISION))


@triton.jit
def keep(x, PRECISION: tl.constexpr):
    return x


def call_ssd(tokens: Tensors, constants: Tensors, state: Tensor, segments: Segments, impl: str) -> Tensor:
    """With a GPU's tiles."""
    from rayk.kernels.ssd_scan.launch import ChunkTiles, ssd_scan_triton

    own = partial(ssd_scan_triton, tiles=ChunkTiles(32, 32, 16, 8, "tf32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_cases, "ssd_scan", lambda *arguments, impl: own(*arguments))
        return SSD.call(tokens, constants, state, segments, impl)


CHUNKS = (
    replace(SSD, unit_shape=(2, 32, 16), call=call_ssd),
    replace(DELTA, unit_shape=(2, 16, 16), call=partial(call_delta, tiles=DeltaTiles(16, 16, 8, "tf32"))),
)
each_op = pytest.mark.parametrize("op", CHUNKS, ids=[op.name for op in CHUNKS])


def run(op: Op, dtype: torch.dtype = torch.float16) -> None:
    """More than one chunk, also of one that goes on; then both at once."""
    world = World(op, [65, 40], 1000, dtype, "chunks")
    world.step([(0, 60)])
    world.step([(0, 4), (1, 38)])
    world.step([(0, 1), (1, 2)])
    world.finish(tight=False)


@each_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_are_as_near_as_the_inputs(op: Op, dtype: torch.dtype, cutting: set[Any]) -> None:
    run(op, dtype)


@each_op
def test_products_of_what_was_cut_would_be_too_small(
    op: Op, cutting: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernels were: nothing rounded before, nothing multiplied in parts."""
    from triton._C.libtriton import ir

    cutting.add(ir.INPUT_PRECISION.TF32x3)
    monkeypatch.setattr(f"rayk.kernels.{op.name}.triton.round_tf32", keep)
    with pytest.raises(AssertionError):
        run(op)


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
