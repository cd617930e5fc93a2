"""Attention of ranks that deal a sequence's tokens: their parts, merged, are attention to all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayk.kernels.mla_attention.partial import mla_attention_partial
from rayk.kernels.paged_attention.merge import merge_partials
from rayk.kernels.paged_attention.partial import Partial, paged_attention_partial
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.cases import AXIS_ORDERS, Batch, dense_attention, make_batch
from tests.kernels.stripe_cases import Stripes, rank_bounds, rank_cache
from tests.kernels.test_mla_attention import Latents, make_latents

MIXED = ((1, 1), (1, 38), (7, 7), (9, 40), (1, 3), (1, 70))
"""One token, which all ranks but one know nothing of; decodes, a prompt, a chunk."""
EVERY_WAY = [
    Stripes(num_ranks, interleave, block_size)
    for num_ranks in (2, 3, 4)
    for block_size, interleave in ((4, 2), (8, 1), (8, 8))
]
IMPLS = ("reference", "torch")


def parts(
    batch: Batch, stripes: Stripes, impl: str, order: str = "LBNHC", **options: object
) -> list[Partial]:
    return [
        paged_attention_partial(
            batch.q,
            rank_cache(batch, stripes, rank, order),
            batch.block_table,
            *rank_bounds(batch, stripes, rank),
            torch.tensor(batch.kv_index),
            scale=0.25,
            head_size_k=batch.head_size_k,
            impl=impl,
            **options,
        )
        for rank in range(stripes.num_ranks)
    ]


def merged(partials: list[Partial], sinks: Tensor | None = None) -> Tensor:
    outs, lses = zip(*partials, strict=True)
    return merge_partials(outs, lses, sinks)


def dealt(stripes: Stripes, **options: object) -> Batch:
    return make_batch(MIXED, block_size=stripes.block_size * stripes.num_ranks, **options)


def check(batch: Batch, actual: Tensor, what: str, **options: object) -> None:
    exact, eager = (dense_attention(batch, d, 0.25, **options) for d in (torch.float64, torch.float32))
    assert_matches(actual, exact, eager, what=what)


@pytest.mark.parametrize("impl", IMPLS)
@each("stripes", EVERY_WAY)
def test_parts_merge_to_the_whole(impl: str, stripes: Stripes) -> None:
    for window in (None, 1, 20):
        batch = dealt(stripes, window=window)
        check(batch, merged(parts(batch, stripes, impl)), f"{stripes}, window {window}")


@pytest.mark.parametrize("impl", IMPLS)
@each("order", AXIS_ORDERS[::2])
def test_in_every_layout_with_uneven_heads_sinks_and_a_soft_cap(impl: str, order: str) -> None:
    stripes = Stripes(3, 2, 4)
    batch = dealt(stripes, kv_index=(1, 0, 1), head_size_v=24, order=order)
    sinks = torch.tensor([2.0, float("-inf"), -1.0])
    partials = parts(batch, stripes, impl, order, soft_cap=1.5)
    check(batch, merged(partials, sinks), order, sinks=sinks, soft_cap=1.5)
    # Counted on every rank, or left out, they would be seen.
    exact = dense_attention(batch, torch.float64, 0.25, sinks=sinks, soft_cap=1.5)
    assert (merged(partials).double() - exact).abs().max() > 0.01


@pytest.mark.parametrize("impl", IMPLS)
def test_half_precision_is_computed_in_float32(impl: str) -> None:
    stripes = Stripes(2, 1, 16)
    batch = dealt(stripes, dtype=torch.bfloat16)
    actual = merged(parts(batch, stripes, impl))
    assert actual.dtype == torch.float32
    exact, eager = (dense_attention(batch, d, 0.25) for d in (torch.float64, torch.bfloat16))
    assert_matches(actual.bfloat16(), exact, eager)


@pytest.mark.parametrize("impl", IMPLS)
def test_who_sees_no_key(impl: str) -> None:
    """Of the one token of the first request, rank 1 has nothing."""
    stripes = Stripes(2, 1, 4)
    batch = dealt(stripes)
    (_, held), (out, lse) = parts(batch, stripes, impl)
    assert not out[0].any()
    assert (lse[0] == float("-inf")).all()
    assert held[0].isfinite().all()
    nobody = merge_partials([out[:1], out[:1]], [lse[:1], lse[:1]])
    assert not nobody.any(), "padding is neither NaN nor anything else"


@pytest.mark.parametrize("impl", IMPLS)
def test_a_rank_left_out_is_seen(impl: str) -> None:
    stripes = Stripes(3, 1, 4)
    batch = dealt(stripes)
    outs, lses = zip(*parts(batch, stripes, impl), strict=True)
    exact = dense_attention(batch, torch.float64, 0.25)
    without = merge_partials(outs[:-1], lses[:-1])
    assert (without[-1].double() - exact[-1]).abs().max() > 0.01
    # As would be an average without weights, with two ranks.
    assert (sum(outs)[-1] / 3 - exact[-1]).abs().max() > 0.01


def test_scores_far_apart_do_not_overflow() -> None:
    outs = [torch.ones(1, 1, 2), torch.full((1, 1, 2), 3.0)]
    lses = [torch.tensor([[1000.0]]), torch.tensor([[1000.0]])]
    assert merge_partials(outs, lses).tolist() == [[[2.0, 2.0]]]
    lses[1] -= 2000
    assert merge_partials(outs, lses, torch.tensor([-1000.0])).tolist() == [[[1.0, 1.0]]]


def latent_parts(latents: Latents, stripes: Stripes, impl: str) -> list[Partial]:
    return [
        mla_attention_partial(
            latents.q,
            rank_cache(latents.batch, stripes, rank)[:, 0],
            latents.batch.block_table,
            *rank_bounds(latents.batch, stripes, rank),
            scale=latents.scale,
            latent_size=latents.latent_size,
            impl=impl,
        )
        for rank in range(stripes.num_ranks)
    ]


@pytest.mark.parametrize("impl", IMPLS)
@each("stripes", EVERY_WAY)
def test_latent_parts_merge_to_the_whole(impl: str, stripes: Stripes) -> None:
    latents = make_latents(MIXED, block_size=stripes.block_size * stripes.num_ranks)
    latents.check(merged(latent_parts(latents, stripes, impl)), str(stripes))


def test_unknown_implementations_are_refused() -> None:
    stripes = Stripes(1, 1, 16)
    with pytest.raises(AssertionError, match="no implementation 'native'"):
        parts(dealt(stripes), stripes, "native")
    with pytest.raises(AssertionError, match="no implementation 'native'"):
        latent_parts(make_latents(MIXED), stripes, "native")
