"""Norms, rotations, gated activations: torch's forms are transformers' own, the C++ ones as right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from rayk.kernels.pointwise import gated, rms_norm, rotate_halves
from rayk.kernels.pointwise.native import is_native, why_no_native
from tests.each import each
from tests.helpers import assert_matches, poison

needs_native = pytest.mark.skipif(why_no_native() is not None, reason=str(why_no_native()))
IMPLS = ("reference", pytest.param("native", marks=needs_native))
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (1, 15, 16, 40, 512)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poison(monkeypatch):
        yield


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads_of(fused: Tensor, first: int, count: int, size: int) -> Tensor:
    """[T, count, size] as a model cuts heads out of one projection: rows are dense, tokens are not."""
    return fused[:, first * size : (first + count) * size].view(-1, count, size)


@each("size", SIZES)
@each("dtype", DTYPES, ids=str)
@each("wide", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_rms_norm(impl: str, wide: bool, dtype: torch.dtype, size: int) -> None:
    x, weight = 3 * draw(7, size, dtype=dtype), draw(size, seed=1, dtype=dtype)
    module = (GptOssRMSNorm if wide else LlamaRMSNorm)(size, eps=1e-5).to(dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    eager = module(x).detach()
    found = rms_norm(x, weight.float() if wide else weight, eps=1e-5, wide=wide, impl=impl)
    if impl == "reference":
        assert torch.equal(found, eager)
    else:
        exact = F.rms_norm(x.double(), (size,), weight.double(), eps=1e-5)
        assert_matches(found, exact, eager)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_rms_norm_of_heads_has_a_weight_of_each(impl: str, dtype: torch.dtype) -> None:
    """As each head alone, whichever heads stand beside it in whatever rows."""
    x, weight = heads_of(draw(5, 6 * 24, dtype=dtype), 1, 4, 24), draw(4, 24, seed=1, dtype=dtype)
    found = rms_norm(x, weight, eps=1e-6, wide=False, impl=impl)
    assert found.is_contiguous()
    for head in range(4):
        alone = rms_norm(x[:, head].contiguous(), weight[head], eps=1e-6, wide=False, impl=impl)
        assert torch.equal(found[:, head], alone)
    exact = F.rms_norm(x.double(), (24,), eps=1e-6)
    unweighted = rms_norm(x, None, eps=1e-6, wide=False, impl=impl)
    assert_matches(unweighted, exact, F.rms_norm(x, (24,), eps=1e-6))


@each("turned", [2, 8, 34, 64])
@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_rotation_is_transformers_own_bit_for_bit(impl: str, dtype: torch.dtype, turned: int) -> None:
    x = heads_of(draw(9, 5 * 64, dtype=dtype), 1, 3, 64)
    angles = 10 * draw(9, turned // 2, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    both = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None, ..., :turned], x[None, :1, :1, :turned], *both)
    found = rotate_halves(x, cos[:, None], sin[:, None], impl=impl)
    assert torch.equal(found[..., :turned], expected[0].transpose(0, 1))
    assert torch.equal(found[..., turned:], x[..., turned:])


@each("size", SIZES)
@each("dtype", DTYPES, ids=str)
@each("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("impl", IMPLS)
def test_gated_activations(impl: str, activation: str, dtype: torch.dtype, size: int) -> None:
    # Most gates where the functions bend, some where they are flat.
    gate_up = draw(6, 2 * size + 3, dtype=dtype)[:, : 2 * size]
    gate_up[:3, :size] *= 20
    gate, up = gate_up.chunk(2, dim=-1)
    functions = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    function = functions[activation]
    exact = function(gate.double()) * up.double()
    assert_matches(gated(gate_up, activation, impl=impl), exact, function(gate) * up)


@needs_native
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so_where_torch_says_so(dtype: torch.dtype, bad: float) -> None:
    x, ones = draw(4, 64, dtype=dtype), torch.ones(4, 1, 16, dtype=dtype)
    x[2, 5] = bad
    pairs = [
        (rms_norm(x, None, eps=1e-5, wide=False, impl=i), gated(x, "silu", impl=i))
        + (rotate_halves(x[:, None], ones, ones, impl=i),)
        for i in ("native", "reference")
    ]
    for ours, theirs in zip(*pairs, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert torch.equal(ours.isnan(), theirs.isnan())


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int) -> None:
    """Large enough for several; each row is one thread's."""
    x, angles = draw(300, 512), draw(300, 1, 32, seed=1)

    def run() -> tuple[Tensor, ...]:
        heads = x.view(300, 8, 64)
        return (
            rms_norm(x, None, eps=1e-5, wide=False, impl="native"),
            rotate_halves(heads, angles.cos(), angles.sin(), impl="native"),
            gated(x, "silu", impl="native"),
        )

    before = torch.get_num_threads()
    alone = [rms_norm(row[None], None, eps=1e-5, wide=False, impl="native") for row in x]
    try:
        torch.set_num_threads(threads)
        normed, turned, activated = run()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(normed, torch.cat(alone))
    assert torch.equal(
        turned, rotate_halves(x.view(300, 8, 64), angles.cos(), angles.sin(), impl="reference")
    )
    assert torch.equal(activated[7:8], gated(x[7:8], "silu", impl="native"))


@needs_native
def test_what_the_kernels_do_not_take_goes_to_torch() -> None:
    halves, strided, odd = draw(3, 8).half(), draw(3, 16)[:, ::2], draw(2, 2, 2, 8)
    for x in (halves, strided, odd):
        assert not is_native(x)
        exact = F.rms_norm(x.double(), (8,), eps=1e-5)
        found = rms_norm(x, None, eps=1e-5, wide=False)
        assert_matches(found, exact, F.rms_norm(x, (8,), eps=1e-5))
        with pytest.raises(AssertionError, match="does not take"):
            rms_norm(x, None, eps=1e-5, wide=False, impl="native")
    wider = rms_norm(draw(3, 8), draw(8, seed=1).bfloat16(), eps=1e-5, wide=False)
    assert wider.dtype == torch.float32
    assert torch.equal(gated(draw(3, 8), "relu2"), F.relu(draw(3, 8)[:, :4]).square() * draw(3, 8)[:, 4:])
