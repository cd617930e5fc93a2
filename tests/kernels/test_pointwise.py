"""Norms, rotations, gated activations: torch's forms are transformers' own, the C++ ones as right."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.cohere2.modeling_cohere2 import apply_rotary_pos_emb as rotate_cohere2
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from rayk.kernels.pointwise import (
    GateThreshold,
    add,
    add_rms_norm,
    gate_sums,
    gated,
    gated_norm,
    layer_norm,
    norm_rotate_halves,
    rms_norm,
    rotate_halves,
    rotate_pairs,
)
from rayk.kernels.pointwise.native import is_native, why_no_native
from tests.each import each
from tests.helpers import assert_matches, poison
from tests.markers import gpu, interpreted

needs_native = pytest.mark.skipif(why_no_native() is not None, reason=str(why_no_native()))
IMPLS = (
    "reference",
    pytest.param("native", marks=needs_native),
    pytest.param("triton", marks=interpreted),
)
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


@needs_native
@each("size", SIZES)
@each("dtype", DTYPES, ids=str)
def test_add_has_the_bits_of_torchs_sum(dtype: torch.dtype, size: int) -> None:
    wide, y = draw(7, 2 * size, dtype=dtype), draw(7, size, seed=1, dtype=dtype)
    x = wide[:, size:]
    assert torch.equal(add(x, y, impl="native"), x + y)


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


def turned_exactly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float64, by angles [T, half]."""
    return rotate_halves(x.double(), cos.double()[:, None], sin.double()[:, None], impl="reference")


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
    if impl == "triton" and dtype == torch.bfloat16:
        # The interpreter has none, and so does not round in between.
        assert_matches(found, turned_exactly(x, cos, sin), rotate_halves(x, cos[:, None], sin[:, None]))
        return
    assert torch.equal(found[..., :turned], expected[0].transpose(0, 1))
    assert torch.equal(found[..., turned:], x[..., turned:])


@each("size", SIZES)
@each("dtype", (*DTYPES, torch.float16), ids=str)
@each("wide", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_sum_is_rounded_before_it_is_normed(impl: str, wide: bool, dtype: torch.dtype, size: int) -> None:
    """As a layer adds to its residual stream and norms that."""
    if impl == "native" and dtype == torch.float16:
        return
    x, added = draw(7, 2 * size, dtype=dtype)[:, :size], 3 * draw(7, 2 * size, seed=2, dtype=dtype)[:, size:]
    weight = draw(size, seed=1, dtype=torch.float32 if wide else dtype)
    total, normed = add_rms_norm(x, added, weight, eps=1e-5, wide=wide, impl=impl)
    assert torch.equal(total, x + added)
    exact = F.rms_norm(total.double(), (size,), weight.double(), eps=1e-5)
    assert_matches(normed, exact, rms_norm(total, weight, eps=1e-5, wide=wide, impl="reference"))


@each("size", [s for s in SIZES if s > 1])
@each("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_layer_norm_is_cohere2s(impl: str, dtype: torch.dtype, size: int) -> None:
    if impl == "native" and dtype == torch.float16:
        return
    x, weight = 3 + draw(7, size, dtype=dtype), draw(size, seed=1, dtype=dtype)
    module = Cohere2LayerNorm(size, eps=1e-5).to(dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    exact = F.layer_norm(x.double(), (size,), weight.double(), eps=1e-5)
    assert_matches(layer_norm(x, weight.float(), eps=1e-5, impl=impl), exact, module(x).detach())


@each("size", SIZES)
@each("dtype", (*DTYPES, torch.float16), ids=str)
@each("order", ["norm_gate", "gate_norm", "plain"])
@pytest.mark.parametrize("impl", IMPLS)
def test_gated_norms_are_qwen3_nexts_and_bambas(impl: str, order: str, dtype: torch.dtype, size: int) -> None:
    """Of three groups, which share a weight or have one each."""
    if impl == "native" and dtype == torch.float16:
        return
    x, gate = draw(5, 3 * size, dtype=dtype), draw(5, 3 * size + 4, seed=1, dtype=dtype)[:, : 3 * size]
    weight = draw(size if order == "norm_gate" else 3 * size, seed=2, dtype=dtype)
    groups, gates, weights = x.view(5, 3, size), gate.unflatten(1, (3, size)), weight.view(-1, size)
    exact = groups.double() * (F.silu(gates.double()) if order != "norm_gate" else 1)
    if order == "plain":
        eager = (groups.float() * F.silu(gates.float())).to(dtype)
    else:
        exact = F.rms_norm(exact, (size,), eps=1e-5) * weights.double()
        norm = Qwen3NextRMSNormGated(size, eps=1e-5)
        if order == "gate_norm":
            norm = BambaRMSNormGated(3 * size, group_size=size, eps=1e-5)
        with torch.no_grad():
            norm.to(dtype).weight.copy_(weight)
            eager = norm(x.view(-1, norm.weight.numel()), gate.reshape(-1, norm.weight.numel())).view(
                5, 3, size
            )
    if order == "norm_gate":
        exact = exact * F.silu(gates.double())
    wide = order != "norm_gate"
    found = gated_norm(
        x,
        gate,
        None if order == "plain" else weight.float() if wide else weight,
        group_size=size,
        eps=1e-5,
        order=order,
        wide=wide,
        impl=impl,
    )
    assert_matches(found.view(5, 3, size), exact, eager)


@each("turned", [8, 64])
@each("wide", [False, True])
@each("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_heads_are_normed_and_then_rotated(impl: str, dtype: torch.dtype, wide: bool, turned: int) -> None:
    if impl == "native" and dtype == torch.float16:
        return
    x = heads_of(draw(9, 5 * 64, dtype=dtype), 1, 3, 64)
    weight = draw(3, 64, seed=1, dtype=torch.float32 if wide else dtype)
    angles = 10 * draw(9, turned // 2, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = norm_rotate_halves(x, weight, cos[:, None], sin[:, None], eps=1e-5, wide=wide, impl=impl)
    normed = F.rms_norm(x.double(), (64,), eps=1e-5) * weight.double()
    eager = rms_norm(x, weight, eps=1e-5, wide=wide, impl="reference")
    eager = rotate_halves(eager, cos[:, None], sin[:, None], impl="reference")
    if impl == "triton" and dtype == torch.float16:
        assert torch.equal(found, eager), "rounded where torch rounds"
    else:
        assert_matches(found, turned_exactly(normed, cos, sin), eager)


@each("turned", [8, 34, 64])
@each("into_halves", [False, True])
@each("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_pairs_rotate_as_cohere2s_and_deepseeks(
    impl: str, dtype: torch.dtype, into_halves: bool, turned: int
) -> None:
    if impl == "native" and dtype == torch.float16:
        return
    x = heads_of(draw(9, 5 * 64, dtype=dtype), 1, 3, 64)
    angles = 10 * draw(9, turned // 2, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = rotate_pairs(x, cos[:, None], sin[:, None], into_halves=into_halves, impl=impl)
    heads = x.transpose(0, 1)[None, ..., :turned]
    if into_halves:
        both = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
        expected, _ = apply_rotary_pos_emb_interleave(heads, heads[:, :1], *both)
    else:
        both = cos.repeat_interleave(2, -1)[None], sin.repeat_interleave(2, -1)[None]
        expected, _ = rotate_cohere2(heads, heads[:, :1], *both)
    if impl == "triton" and dtype == torch.bfloat16:
        wide = rotate_pairs(x.double(), cos.double()[:, None], sin.double()[:, None], into_halves=True)
        if into_halves:
            assert_matches(found, wide, rotate_pairs(x, cos[:, None], sin[:, None], into_halves=True))
            return
    assert torch.equal(found[..., :turned], expected[0].transpose(0, 1))
    assert torch.equal(found[..., turned:], x[..., turned:])


@each("into_halves", [None, False, True])
@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_rotation_goes_where_it_is_told(impl: str, dtype: torch.dtype, into_halves: bool | None) -> None:
    """To a part of wider rows, whose rest stays."""
    x, angles = heads_of(draw(9, 5 * 40, dtype=dtype), 1, 3, 40), draw(9, 1, 17, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turn: Any = rotate_halves if into_halves is None else partial(rotate_pairs, into_halves=into_halves)
    wide = torch.full((9, 3, 64), 7.0, dtype=dtype)
    found = turn(x, cos, sin, out=wide[..., 8:48], impl=impl)
    assert found.data_ptr() == wide[..., 8:48].data_ptr()
    assert torch.equal(found, turn(x, cos, sin, impl=impl))
    assert torch.equal(wide[..., :8], torch.full((9, 3, 8), 7.0, dtype=dtype))
    assert torch.equal(wide[..., 48:], torch.full((9, 3, 16), 7.0, dtype=dtype))


@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_pairs_turn_by_float32_angles(impl: str, dtype: torch.dtype) -> None:
    """As llama4's do."""
    x, angles = heads_of(draw(9, 5 * 40, dtype=dtype), 1, 3, 40), draw(9, 1, 20, seed=1)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (20, 2)))
    exact = torch.view_as_real(pairs * torch.polar(torch.ones(9, 1, 20).double(), angles.double())).flatten(
        -2
    )
    eager = rotate_pairs(x, angles.cos(), angles.sin(), impl="reference")
    assert_matches(rotate_pairs(x, angles.cos(), angles.sin(), impl=impl), exact, eager)


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


@each("size", [15, 40, 2500])
@each("dtype", [torch.float32, torch.float16], ids=str)
@each("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=interpreted)])
def test_gates_are_cut_before_they_open(impl: str, activation: str, dtype: torch.dtype, size: int) -> None:
    """At a quantile of a normal distribution like theirs. A mean of many deviations hides these in float32;
    float16 rounds the cut as torch does."""
    gate_up = draw(4, 2 * size, dtype=dtype)
    gate_up[1, :size] += 40 if dtype == torch.float32 else 0
    gate, up = gate_up.chunk(2, dim=-1)
    sums, wide = gate_sums(gate, impl=impl), gate.double()
    torch.testing.assert_close(sums, torch.stack([wide.sum(-1), wide.square().sum(-1)], -1))
    functions = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    activated, cut = functions[activation], GateThreshold(sums, size, 0.5)
    at = wide.mean(-1, keepdim=True) + 0.5 * wide.std(-1, keepdim=True, correction=0)
    exact, eager = activated(F.relu(wide - at)) * up.double(), activated(cut.apply(gate)) * up
    if dtype == torch.float16:
        exact = activated(cut.apply(gate).double()) * up.double()
    assert_matches(gated(gate_up, activation, cut=cut, impl=impl), exact, eager)


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


@gpu
@each("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("size", [128, 2880, 16384])
def test_on_a_gpu(size: int, dtype: torch.dtype) -> None:
    """Every kernel at sizes of real models against torch on the same device."""
    x, added = 3 * draw(40, size, dtype=dtype).cuda(), draw(40, size, seed=1, dtype=dtype).cuda()
    weight = draw(size, seed=2).cuda()
    heads, angles = x.view(-1, 4, min(size // 4, 128)), draw(10 * size, seed=3)
    half = heads.shape[2] // 4
    cos, sin = (
        turn(angles[: len(heads) * half]).view(-1, 1, half).to(dtype).cuda()
        for turn in (torch.cos, torch.sin)
    )

    def run(impl: str, wide: bool, kind: torch.dtype) -> list[Tensor]:
        y, more, groups, turns = (t.to(kind) for t in (x, added, heads, torch.stack([cos, sin])))
        own = weight.to(dtype).to(torch.float32 if wide else kind)
        of_heads = own[: heads.shape[2]].expand(heads.shape[1:]).contiguous()
        of_groups = own if wide else own[: size // 4]
        settings: dict[str, Any] = {"eps": 1e-5, "wide": wide, "impl": impl}
        return [
            rms_norm(y, own, **settings),
            *add_rms_norm(y, more, own, **settings),
            layer_norm(y, weight, eps=1e-5, impl=impl),
            norm_rotate_halves(groups, of_heads, *turns, **settings),
            rotate_halves(groups, *turns, impl=impl),
            rotate_pairs(groups, *turns, impl=impl),
            rotate_pairs(groups, *turns, into_halves=True, impl=impl),
            gated(y, "silu", impl=impl),
            gated(y, "gelu_tanh", impl=impl),
            gated_norm(
                y,
                more,
                of_groups,
                group_size=size // 4,
                order="gate_norm" if wide else "norm_gate",
                **settings,
            ),
        ]

    for wide in (False, True):
        found, eager = run("triton", wide, dtype), run("reference", wide, dtype)
        exact = run("reference", wide, torch.float32)
        for parts in zip(found, exact, eager, strict=True):
            assert_matches(parts[0], parts[1].double(), parts[2])
