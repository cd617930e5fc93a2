"""Quantised latents: exactly the right bytes are stored, and attention is that over the dequantised rows."""

from __future__ import annotations

import pytest
import torch

from rayk.kernels.store_kv import store_kv
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.quantised_cases import bound, empty_cache, quantised, row_bytes
from tests.kernels.test_mla_attention import DECODES, MIXED, NARROW, Latents, counts, make_latents, mark
from tests.markers import interpreted

FORMATS = ("fp8_e4m3", "fp8_e4m3_token_head", "nvfp4")
ORDERS = ("LBNHC", "BHLNC")
STORES = ("reference", pytest.param("triton", marks=interpreted))
IMPLS = ("reference", "torch", pytest.param("triton", marks=interpreted))
SCALES = (0.37, 0.37)
"""A latent's is its rotated key's."""


def of_scale(latents: Latents, factor: float) -> None:
    """Rows so large that a forgotten scale shows, in scores and in what they weigh."""
    for rows in (latents.batch.keys, latents.batch.values):
        rows[:] = [x * factor for x in rows]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("impl", STORES)
def test_only_the_named_rows_change(impl: str, name: str) -> None:
    """Rows are what `quantise` says of each token by itself, at their places; no other byte is touched."""
    shape = {"blocks": 5, "heads": 1, "slots": 8, "head_sizes": (48, 16)}
    found, wanted = (empty_cache(name, "BLHNC", **shape) for _ in range(2))  # type: ignore[arg-type]
    slots = [9, -1, 15, 16, 39, -1, 30]
    latent, rope = torch.randn(7, 1, 64, generator=torch.Generator().manual_seed(1)).split((48, 16), -1)
    for token, slot in enumerate(slots):
        for bundle, row in row_bytes(name, latent[token, 0], rope[token, 0], SCALES).items():
            if slot >= 0:
                wanted[bundle][slot // 8, 0, slot % 8] = row
    store_kv(latent, rope, bound(name, found, (48, 16), SCALES), torch.tensor(slots), impl=impl)
    for bundle, view in wanted.items():
        assert torch.equal(found[bundle], view), bundle


@each("order", ORDERS)
@each("name", FORMATS)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_visible_row_counts_once(impl: str, name: str, order: str, poisoned_empty: None) -> None:
    """Whatever nobody sees is NaN."""
    latents = make_latents(MIXED, rope=16, order=order, block_size=16, kernel_block_size=8)
    mark(latents)
    seen, expected = counts(latents)
    found = latents.run(impl, cache=quantised(latents.batch, name, order, (1.0, 1.0)))
    found = (found * seen).round().long()
    assert torch.equal(found, expected.expand_as(found))


@each("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("requests", "num_heads", "latent", "rope"),
    [(MIXED, 3, 32, 16), (DECODES, 17, 48, 16), (((20, 20),), 2, 64, 32)],
    ids=["mixed", "decode", "prefill"],
)
@each("name", FORMATS)
@pytest.mark.parametrize("impl", IMPLS)
def test_numbers_match_float64(
    impl: str,
    name: str,
    requests: tuple[tuple[int, int], ...],
    num_heads: int,
    latent: int,
    rope: int,
    dtype: torch.dtype,
) -> None:
    """Against attention in float64 over the dequantised latents and rotated keys."""
    latents = make_latents(requests, num_heads=num_heads, latent=latent, rope=rope)
    of_scale(latents, 3.0)
    cache = quantised(latents.batch, name, "BLHNC", SCALES)
    latents.q = latents.q.to(dtype)
    latents.check(latents.run(impl, cache=cache), impl)


@interpreted
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_splits_and_small_tiles(name: str, num_splits: int, poisoned_empty: None) -> None:
    latents = make_latents(DECODES, num_heads=5, latent=48, rope=16)
    cache = quantised(latents.batch, name, "LBNHC", SCALES)
    latents.check(latents.run("triton", cache=cache, tiles=NARROW, num_splits=num_splits), "splits")


@pytest.mark.parametrize("impl", IMPLS)
def test_sizes_that_are_no_powers_of_two(impl: str) -> None:
    """Nor whole blocks, but whole float32s with their scales."""
    for name in ("fp8_e4m3", "fp8_e4m3_token_head"):
        latents = make_latents(MIXED, latent=41, rope=7)
        cache = quantised(latents.batch, name, "BLHNC", SCALES)
        latents.check(latents.run(impl, cache=cache), f"{impl} {name}")


def test_unlike_scales_are_refused() -> None:
    latents = make_latents(((1, 3),))
    cache = quantised(latents.batch, "fp8_e4m3", "BLHNC", (0.5, 0.25))
    with pytest.raises(AssertionError, match="scaled alike"):
        latents.run("torch", cache=cache)
    assert_matches(
        latents.run("torch", cache=quantised(latents.batch, "fp8_e4m3", "BLHNC", (0.5, 0.5))),
        latents.dense(torch.float64),
        latents.dense(torch.float32),
        what="alike",
    )
