"""Attention sinks and soft cap: where they count (exactly), and right against float64 and other code."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from rayk.kernels.paged_attention import paged_attention, torch_cpu
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.cases import AXIS_ORDERS, Batch, count_marks, dense_attention, make_batch, num_seen
from tests.kernels.test_paged_attention import DTYPES, FAST, IMPLS, MIXED, needs_native
from tests.markers import gpu, one_per

FOUR_SINKS = torch.tensor([1.5, -2.0, 0.3, 4.0])
VARIANTS = {
    "sinks": {"sinks": FOUR_SINKS},
    "cap": {"soft_cap": 1.5},
    "both": {"sinks": FOUR_SINKS, "soft_cap": 1.5},
}


def run(batch: Batch, impl: str, scale: float = 0.25, **softmax: Tensor | float | None) -> Tensor:
    return paged_attention(
        *batch.arguments(),
        scale=scale,
        window=batch.window,
        head_size_k=batch.head_size_k,
        impl=impl,
        **softmax,
    )


def check_marks_with_sinks(batch: Batch, impl: str) -> None:
    """Scores are 0 and head i's sink is log(i + 1): what it sees is diluted by exactly i + 1 more tokens."""
    extra = torch.arange(1, len(batch.kv_index) + 1)
    out = run(batch, impl, sinks=extra.log(), soft_cap=3.0).float()
    assert out.isfinite().all(), "a slot that no token owns was read"
    counts = out * (num_seen(batch) + extra.view(1, -1, 1))
    assert torch.equal(counts.round().long(), count_marks(batch))
    assert float((counts - counts.round()).abs().max()) < 0.2


@each("window", [None, 1, 21])
@each("order", AXIS_ORDERS)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_sink_counts_once_in_every_layout(
    impl: str, order: str, window: int | None, poisoned_empty: None
) -> None:
    """Window 1 leaves a token and the sink."""
    check_marks_with_sinks(make_batch(MIXED, order=order, block_size=8, window=window, marks=True), impl)


@each("kv_index", [(0,), (1, 0), (2, 0, 1, 2, 0, 1), (0, 0, 0, 1, 2), (2, 2, 0), (1,) * 12], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_each_query_head_has_its_own_sink(impl: str, kv_index: tuple[int, ...]) -> None:
    check_marks_with_sinks(make_batch(((1, 20), (6, 11)), kv_heads=3, kv_index=kv_index, marks=True), impl)


@pytest.mark.parametrize("impl", FAST)
def test_a_sink_counts_once_over_many_tiles(impl: str) -> None:
    check_marks_with_sinks(make_batch(((1, 700), (5, 300)), marks=True), impl)


@needs_native
@pytest.mark.parametrize("group_size", [64, 65, 71, 130])
def test_native_serves_groups_larger_than_a_tile(group_size: int) -> None:
    batch = make_batch(((1, 70), (5, 9)), kv_heads=1, kv_index=(0,) * group_size)
    sinks = torch.linspace(-3, 3, group_size)
    exact = dense_attention(batch, torch.float64, 0.25, sinks=sinks)
    eager = dense_attention(batch, torch.float32, 0.25, sinks=sinks)
    assert_matches(run(batch, "native", sinks=sinks), exact, eager)


@each("head_sizes", [(16, 16), (24, 16), (80, 48), (256, 256)], ids=str)
@each("variant", VARIANTS)
@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", FAST)
def test_numbers_match_float64(
    impl: str, dtype: torch.dtype, variant: str, head_sizes: tuple[int, int]
) -> None:
    """Scores reach about 4: a cap of 1.5 bends them."""
    softmax, (dk, dv) = VARIANTS[variant], head_sizes
    batch = make_batch(MIXED, head_size_k=dk, head_size_v=dv, dtype=dtype, window=30, kv_index=(1, 0, 0, 0))
    scale = 1.5 * dk**-0.5
    actual = run(batch, impl, scale, **softmax)
    exact = dense_attention(batch, torch.float64, scale, **softmax)
    assert_matches(actual, exact, dense_attention(batch, dtype, scale, **softmax), what=impl, tight=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_in_float64_is_exact(variant: str) -> None:
    batch = make_batch(MIXED, dtype=torch.float64, window=13)
    exact = dense_attention(batch, torch.float64, 0.25, **VARIANTS[variant])
    assert float((run(batch, "reference", **VARIANTS[variant]) - exact).abs().max()) < 1e-14


@pytest.mark.parametrize("soft_cap", [1e-3, 0.5, 50.0])
@pytest.mark.parametrize("impl", FAST)
def test_scores_far_apart_do_not_overflow(impl: str, soft_cap: float) -> None:
    """Scores of +-1e4 lie on the flat ends of the cap, small ones where tanh is nearly straight."""
    batch = make_batch(((1, 200), (70, 130)))
    batch.q *= torch.logspace(-4, 2.6, len(batch.q)).view(-1, 1, 1)
    softmax = {"sinks": FOUR_SINKS, "soft_cap": soft_cap}
    exact = dense_attention(batch, torch.float64, 1.0, **softmax)
    eager = dense_attention(batch, torch.float32, 1.0, **softmax)
    assert_matches(run(batch, impl, 1.0, **softmax), exact, eager, what=impl)


@pytest.mark.parametrize("impl", FAST)
def test_a_sink_of_minus_infinity_is_no_sink(impl: str) -> None:
    batch = make_batch(MIXED, window=20)
    actual = run(batch, impl, sinks=torch.full((4,), float("-inf")))
    exact = dense_attention(batch, torch.float64, 0.25)
    assert_matches(actual, exact, dense_attention(batch, torch.float32, 0.25), what=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_huge_sink_takes_all_the_weight(impl: str) -> None:
    """Only from the head that has it."""
    batch = make_batch(MIXED)
    out = run(batch, impl, sinks=torch.tensor([0.0, 1e4, 0.0, 0.0]))
    assert float(out[:, 1].abs().max()) == 0
    assert float(out[:, (0, 2, 3)].abs().amin(dim=(0, 2)).min()) > 0


@pytest.mark.parametrize("impl", FAST)
def test_a_large_cap_is_no_cap(impl: str) -> None:
    batch = make_batch(MIXED)
    exact = dense_attention(batch, torch.float64, 0.25)
    eager = dense_attention(batch, torch.float32, 0.25, soft_cap=1e5)
    assert_matches(run(batch, impl, soft_cap=1e5), exact, eager, what=impl)


def test_torch_cuts_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(((50, 60), (1, 64), (33, 33)), window=40)
    expected = run(batch, "torch", **VARIANTS["both"])
    monkeypatch.setattr(torch_cpu, "_SCORES_AT_ONCE", 4 * 60 * 7)
    exact = dense_attention(batch, torch.float64, 0.25, **VARIANTS["both"])
    assert_matches(run(batch, "torch", **VARIANTS["both"]), exact, expected)


def causal(num_queries: int, total: int, window: int | None) -> Tensor:
    """[queries, keys] True where the key is seen."""
    seen = torch.ones(num_queries, total, dtype=torch.bool).tril(total - num_queries)
    return seen if window is None else seen.triu(total - num_queries - window + 1)


def per_request(batch: Batch, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(q [1, Q, n, D], k [1, H, t, D], v, seen [n, t]) of each request, as other code takes them."""
    problems = []
    queries = batch.q.split([n for n, _ in batch.requests])
    for (n, total), q, k, v in zip(batch.requests, queries, batch.keys, batch.values, strict=True):
        q, k, v = (x.to(dtype).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        problems.append((q, k, v, causal(n, total, batch.window)))
    return problems


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, 1, *seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def gpt_oss_eager(batch: Batch, dtype: torch.dtype, scale: float) -> Tensor:
    """[T, Q, Dv] by the function that transformers' gpt-oss runs."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = SimpleNamespace(num_key_value_groups=2, sinks=FOUR_SINKS.to(dtype), training=False)
    return torch.cat(
        [
            eager_attention_forward(module, q, k, v, additive(seen, dtype), scaling=scale)[0][0]
            for q, k, v, seen in per_request(batch, dtype)
        ]
    )


def gemma2_eager(batch: Batch, scale: float, soft_cap: float) -> Tensor:
    """[T, Q, Dv] by the function that transformers' gemma2 runs; its softmax is never in float64."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    module = SimpleNamespace(num_key_value_groups=2, training=False)
    return torch.cat(
        [
            eager_attention_forward(
                module, q, k, v, additive(seen, torch.float32), scaling=scale, softcap=soft_cap
            )[0][0]
            for q, k, v, seen in per_request(batch, torch.float32)
        ]
    )


def flex(batch: Batch, dtype: torch.dtype, scale: float, soft_cap: float) -> Tensor:
    """[T, Q, Dv] by torch's flex_attention; the sink from the log of its softmax's denominator."""
    rows = []
    for q, k, v, seen in per_request(batch, dtype):

        def bend(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, seen: Tensor = seen) -> Tensor:
            return torch.where(seen[i, j], soft_cap * torch.tanh(score / soft_cap), float("-inf"))

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            out, aux = flex_attention(
                q, k, v, score_mod=bend, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
            )
        kept = torch.sigmoid(aux.lse - FOUR_SINKS.to(dtype).view(1, -1, 1))
        rows.append((out * kept.unsqueeze(-1))[0].transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("impl", IMPLS)
def test_sinks_match_transformers_gpt_oss(impl: str, window: int | None) -> None:
    batch = make_batch(MIXED, head_size_k=32, head_size_v=32, window=window)
    exact = gpt_oss_eager(batch, torch.float64, 0.2)
    eager = gpt_oss_eager(batch, torch.float32, 0.2)
    assert_matches(run(batch, impl, 0.2, sinks=FOUR_SINKS), exact, eager, what=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_soft_cap_matches_transformers_gemma2(impl: str) -> None:
    batch = make_batch(MIXED, head_size_k=32, head_size_v=32, window=30)
    gemma = gemma2_eager(batch, 0.5, 2.0)
    exact = dense_attention(batch, torch.float64, 0.5, soft_cap=2.0)
    assert_matches(gemma, exact, dense_attention(batch, torch.float32, 0.5, soft_cap=2.0), what="gemma2")
    assert_matches(run(batch, impl, 0.5, soft_cap=2.0), exact, gemma, what=impl)


@one_per()
@pytest.mark.parametrize("impl", IMPLS)
def test_both_match_flex_attention(impl: str) -> None:
    batch = make_batch(MIXED, head_size_k=32, head_size_v=32, window=30)
    exact = flex(batch, torch.float64, 0.5, 2.0)
    eager = flex(batch, torch.float32, 0.5, 2.0)
    assert_matches(run(batch, impl, 0.5, sinks=FOUR_SINKS, soft_cap=2.0), exact, eager, what=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "softmax",
    [
        {"sinks": torch.zeros(3)},
        {"sinks": torch.zeros(4, dtype=torch.bfloat16)},
        {"soft_cap": 0.0},
        {"soft_cap": -1.0},
    ],
    ids=["a sink too few", "bfloat16 sinks", "a cap of zero", "a negative cap"],
)
def test_nonsense_is_an_error(impl: str, softmax: dict[str, Tensor | float]) -> None:
    with pytest.raises(AssertionError, match="sinks|soft cap"):
        run(make_batch(((1, 5),)), impl, **softmax)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_triton_on_the_gpu(dtype: torch.dtype, variant: str) -> None:
    """A mixed batch, and a decode batch long enough to be split."""
    for requests in (MIXED, ((1, 3000), (1, 17))):
        batch = make_batch(requests, head_size_k=64, head_size_v=64, dtype=dtype)
        softmax = VARIANTS[variant]
        exact = dense_attention(batch, torch.float64, 0.25, **softmax)
        eager = dense_attention(batch, dtype, 0.25, **softmax)
        storage = torch.tensor([], dtype=dtype).set_(batch.cache.untyped_storage()).cuda()
        cache = storage.as_strided(batch.cache.shape, batch.cache.stride(), batch.cache.storage_offset())
        q, _, *rest = batch.arguments()
        on_gpu = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in softmax.items()}
        tensors = (q.cuda(), cache, *(t.cuda() for t in rest))
        out = paged_attention(*tensors, scale=0.25, window=None, head_size_k=64, **on_gpu)
        assert_matches(out.cpu(), exact, eager, what=str(requests))
