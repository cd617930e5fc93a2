"""Parts of attention by the Triton kernels: outputs and sums of exponents are those of a rank's own tokens.

Here the kernels run in Triton's interpreter; on a machine with a GPU the same checks run compiled (`make
test-gpu`). Tokens of a request are taken together, or one by one as in a decode step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayk.kernels.mla_attention.launch import mla_attention_partial_triton
from rayk.kernels.paged_attention import head_groups
from rayk.kernels.paged_attention.launch import paged_attention_partial_triton
from rayk.kernels.paged_attention.merge import merge_partials
from rayk.kernels.paged_attention.partial import Partial
from rayk.kernels.paged_attention.reference import paged_attention_reference
from rayk.kernels.paged_attention.tiles import Tiles
from rayk.kernels.quantise import QuantisedKV
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.cases import Batch, dense_attention, make_batch
from tests.kernels.quantised_cases import cached, round_dense
from tests.kernels.stripe_cases import Stripes, rank_attention, rank_bounds, rank_cache, rank_places
from tests.kernels.test_mla_attention import Latents, make_latents
from tests.markers import gpu, interpreted, one_per, thorough

ON = [
    pytest.param("cpu", marks=interpreted, id="interpreter"),
    pytest.param("cuda", marks=gpu, id="gpu"),
]
NARROW = Tiles(16, 16, 4, 1)
"""Small tiles: many of them, also in short sequences."""
MIXED = ((1, 1), (1, 38), (7, 7), (9, 40), (1, 3), (1, 70))
EVERY_LENGTH = ((70, 70),)
DECODES = ((1, 1), (1, 70), (1, 6))
FEW = ((1, 1), (3, 40), (1, 6))
"""Rows of the block table are not tokens, also one by one."""
SCALE = 0.25


def moved(x: Tensor | QuantisedKV, device: str) -> Any:
    """With strides as they are."""
    if isinstance(x, QuantisedKV):
        assert device == "cpu"
        return x
    storage = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def part(
    batch: Batch,
    stripes: Stripes,
    rank: int,
    device: str,
    *,
    together: bool,
    cache: QuantisedKV | None = None,
    order: str = "LBNHC",
    **options: Any,
) -> Partial:
    """Through the launcher."""
    out, lse = paged_attention_partial_triton(
        batch.q.to(device),
        moved(rank_cache(batch, stripes, rank, order) if cache is None else cache, device),
        batch.block_table.to(device),
        batch.query_start_loc.to(device) if together else None,
        *(bound.to(device) for bound in rank_bounds(batch, stripes, rank)),
        groups=head_groups(torch.tensor(batch.kv_index, device=device)),
        head_size_k=batch.head_size_k,
        scale=SCALE,
        **options,
    )
    assert out.dtype == lse.dtype == torch.float32
    return out.cpu(), lse.cpu()


def check(batch: Batch, stripes: Stripes, device: str, what: str, **options: Any) -> list[Partial]:
    """Every rank against float64, and what they merge to."""
    found = []
    soft_cap = options.get("soft_cap")
    caches = options.pop("caches", [None] * stripes.num_ranks)
    for rank, cache in enumerate(caches):
        partial = part(batch, stripes, rank, device, cache=cache, **options)
        exact, eager = (
            rank_attention(batch, stripes, rank, dtype, SCALE, soft_cap)
            for dtype in (torch.float64, torch.float32 if device == "cpu" else batch.q.dtype)
        )
        blind = exact[1] == float("-inf")
        assert torch.equal(partial[1] == float("-inf"), blind), f"{what}, rank {rank}"
        assert not partial[0][blind].any(), f"{what}, rank {rank}: not zeros where no key is seen"
        for actual, wanted, plain in zip(partial, exact, eager, strict=True):
            assert_matches(actual[~blind], wanted[~blind], plain[~blind], what=f"{what}, rank {rank}")
        found.append(partial)
    whole = [dense_attention(batch, d, SCALE, soft_cap=soft_cap) for d in (torch.float64, batch.q.dtype)]
    merged = merge_partials(*zip(*found, strict=True))
    assert_matches(merged.to(batch.q.dtype), *whole, what=f"{what}, merged")
    return found


@thorough
@pytest.mark.parametrize("device", ON)
@each(
    ("number", "stripes"),
    enumerate(
        Stripes(num_ranks, interleave, block_size)
        for num_ranks in (1, 2, 3, 4)
        for block_size, interleave in ((8, 1), (4, 2), (8, 8))
    ),
)
def test_every_length_in_every_way(number: int, stripes: Stripes, device: str, poisoned_empty: None) -> None:
    """A prompt of 70 tokens has the lengths 1 to 70; decodes have some. Windows hide whole tiles."""
    options = {"window": (None, 1, 20, 33)[number % 4], "block_size": stripes.block_size * stripes.num_ranks}
    soft_cap = 1.5 if number % 2 else None
    prompt = make_batch(EVERY_LENGTH, **options)
    check(prompt, stripes, device, f"{stripes}, prompt", together=True, soft_cap=soft_cap)
    lengths = range(1 + number, 71, 12)
    batch = make_batch(tuple((1, n) for n in lengths), **options)
    more = {"soft_cap": soft_cap, "num_splits": 1 + number // 2 % 3, "tiles": NARROW}
    check(batch, stripes, device, f"{stripes}, decodes", together=False, **more)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_a_mixed_batch_of_two_ranks(device: str, together: bool, poisoned_empty: None) -> None:
    """Uneven heads, and a request of which rank 1 has nothing; the merged result, with sinks, is that of
    attention to everything."""
    stripes = Stripes(2, 1, 4)
    window = None if together else 20
    shape = {"block_size": 8, "kv_index": (1, 0, 1), "head_size_v": 24, "order": "BLHNC"}
    batch = make_batch(MIXED if together else FEW, window=window, **shape)
    options = {} if together else {"num_splits": 2, "tiles": NARROW}
    found = check(batch, stripes, device, "mixed", together=together, order="BLHNC", soft_cap=1.5, **options)
    assert (found[1][1][0] == float("-inf")).all()
    sinks = torch.tensor([2.0, float("-inf"), -1.0])
    whole = paged_attention_reference(
        *batch.arguments(), scale=SCALE, window=window, head_size_k=16, sinks=sinks, soft_cap=1.5
    )
    merged = merge_partials(*zip(*found, strict=True), sinks)
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5)


@thorough
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    ("dk", "dv", "kv_index", "together", "dtype"),
    [
        (80, 80, (0, 0, 0, 1, 1, 1), True, torch.float32),
        (192, 128, (0,) * 7, False, torch.bfloat16),
        (256, 256, (1, 0, 0, 0), True, torch.float16),
        (112, 64, (0,) * 16, True, torch.bfloat16),
        (40, 72, (0,) * 40, False, torch.float16),
    ],
)
def test_head_sizes_and_groups(
    device: str, dk: int, dv: int, kv_index: tuple[int, ...], together: bool, dtype: torch.dtype
) -> None:
    shape = {"head_size_k": dk, "head_size_v": dv, "kv_index": kv_index, "dtype": dtype}
    batch = make_batch(((9, 40), (1, 21)) if together else DECODES, block_size=32, window=30, **shape)
    batch.q *= 4 * dk**-0.5
    check(batch, Stripes(2, 1, 16), device, f"{dk}/{dv}", together=together)


@interpreted
@one_per()
@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_token_head", "nvfp4"])
def test_quantised_caches(name: str, together: bool, poisoned_empty: None) -> None:
    stripes = Stripes(2, 2, 4)
    requests = ((9, 40), (1, 1)) if together else DECODES
    batch = make_batch(requests, block_size=8, head_size_k=32, head_size_v=64)
    caches = [cached(batch, name, "LBNHC", rank_places(batch, stripes, rank), 4) for rank in (0, 1)]
    round_dense(batch, name)
    check(batch, stripes, "cpu", name, together=together, caches=caches)


def latent_part(latents: Latents, stripes: Stripes, rank: int, device: str, **options: Any) -> Partial:
    starts = latents.batch.query_start_loc.to(device) if options.pop("together") else None
    out, lse = mla_attention_partial_triton(
        latents.q.to(device),
        moved(rank_cache(latents.batch, stripes, rank)[:, 0], device),
        latents.batch.block_table.to(device),
        starts,
        *(bound.to(device) for bound in rank_bounds(latents.batch, stripes, rank)),
        scale=latents.scale,
        latent_size=latents.latent_size,
        **options,
    )
    return out.cpu(), lse.cpu()


def as_heads(latents: Latents) -> Batch:
    """Rows are keys of one head, and their latents its values."""
    rows = [row.unsqueeze(1) for row in latents.rows]
    values = [row[..., : latents.latent_size] for row in rows]
    return replace(latents.batch, q=latents.q, keys=rows, values=values, kv_index=[0] * latents.q.shape[1])


def check_latents(latents: Latents, stripes: Stripes, device: str, **options: Any) -> None:
    found = []
    for rank in range(stripes.num_ranks):
        partial = latent_part(latents, stripes, rank, device, **options)
        exact, eager = (
            rank_attention(as_heads(latents), stripes, rank, dtype, latents.scale)
            for dtype in (torch.float64, torch.float32)
        )
        blind = exact[1] == float("-inf")
        assert torch.equal(partial[1] == float("-inf"), blind)
        assert not partial[0][blind].any()
        for actual, wanted, plain in zip(partial, exact, eager, strict=True):
            assert_matches(actual[~blind], wanted[~blind], plain[~blind], what=f"{stripes}, rank {rank}")
        found.append(partial)
    latents.check(merge_partials(*zip(*found, strict=True)), f"{stripes}, merged")


@thorough
@pytest.mark.parametrize("device", ON)
@each(
    "stripes",
    [Stripes(1, 1, 4), Stripes(2, 1, 8), Stripes(2, 2, 4), Stripes(3, 8, 8), Stripes(4, 1, 4)],
)
def test_latents_of_every_length(stripes: Stripes, device: str, poisoned_empty: None) -> None:
    block_size = stripes.block_size * stripes.num_ranks
    check_latents(make_latents(EVERY_LENGTH, block_size=block_size), stripes, device, together=True)
    decodes = make_latents(((1, 1), (1, 37), (1, 70)), block_size=block_size)
    more = {"num_splits": stripes.num_ranks, "tiles": NARROW}
    check_latents(decodes, stripes, device, together=False, **more)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_latents_of_two_ranks(device: str, together: bool, poisoned_empty: None) -> None:
    latents = make_latents(MIXED if together else FEW, block_size=8)
    check_latents(latents, Stripes(2, 1, 4), device, together=together)
