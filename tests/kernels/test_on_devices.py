"""Kernels on a GPU at the sizes of released models; the same tests, smaller, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayk.kernels.copy_runs import copy_runs, make_run_table
from rayk.kernels.digest import DigestedView, DigestedViews, RowPlaces, digest_views
from rayk.kernels.paged_attention import paged_attention
from rayk.kernels.quantise import Quantised, QuantisedKV, dequantise, quantise
from rayk.kernels.store_kv import store_kv
from rayk.kv.formats import FORMATS
from tests.helpers import assert_matches
from tests.kernels.cases import Batch, dense_attention, make_batch
from tests.kernels.quantised_cases import bound, empty_cache, quantised
from tests.kernels.test_copy_runs import scattered_runs
from tests.kernels.test_mla_attention import make_latents
from tests.kernels.test_quantise import some_values
from tests.markers import gpu, interpreted, thorough

QUANTISED = ("fp8_e4m3", "fp8_e4m3_token_head", "nvfp4")
BATCHES = {
    "mixed": ((1, 1), (1, 300), (7, 7), (90, 400), (1, 64)),
    "decode": ((1, 1), (1, 700), (1, 64), (1, 65)),
}
SMALL = {"mixed": ((1, 1), (1, 20), (5, 37)), "decode": ((1, 1), (1, 270))}


def on_devices(names: str, small: Sequence[Any], whole: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by `device` and these: `small` cases are interpreted, `whole` ones run on a GPU."""
    marks = {"cpu": [interpreted, thorough], "cuda": [gpu]}
    cases = [
        pytest.param(device, *(case if isinstance(case, tuple) else (case,)), marks=marks[device])
        for device, of_device in (("cpu", small), ("cuda", whole))
        for case in of_device
    ]
    return pytest.mark.parametrize(f"device, {names}", cases)


each_name = pytest.mark.parametrize("name", QUANTISED)
each_batch = pytest.mark.parametrize("kind", list(BATCHES))
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def requests_of(kind: str, device: str) -> tuple[tuple[int, int], ...]:
    return (BATCHES if device == "cuda" else SMALL)[kind]


def moved(view: Tensor, device: str) -> Tensor:
    """The same view of its whole storage, on the device."""
    storage = torch.tensor([], dtype=view.dtype).set_(view.untyped_storage()).to(device, copy=True)
    return storage.as_strided(view.shape, view.stride(), view.storage_offset())


def moved_cache(cache: QuantisedKV, device: str) -> QuantisedKV:
    sides = {
        name: Quantised(moved(side.data, device), None if side.scales is None else moved(side.scales, device))
        for name, side in (("k", cache.k), ("v", cache.v))
    }
    return replace(cache, **sides)


def assert_attends(
    batch: Batch, cache: Tensor | QuantisedKV, head_size: int, dtype: torch.dtype, *, what: str
) -> None:
    """Hold attention over the batch's cache, which lies on the device to test, to float64."""
    q, _, *rest = batch.arguments()
    scale = head_size**-0.5
    device = cache.device
    out = paged_attention(
        q.to(device),
        cache,
        *(x.to(device) for x in rest),
        scale=scale,
        window=batch.window,
        head_size_k=head_size,
        impl="triton",
    )
    exact, eager = (dense_attention(batch, d, scale) for d in (torch.float64, dtype))
    assert_matches(out.cpu(), exact, eager, what=what)


def raw(side: Quantised) -> list[Tensor]:
    return [x.cpu().contiguous().view(torch.uint8) for x in side if x is not None]


@each_name
@each_dtype
@on_devices("heads", [2], [3, 64])
def test_quantised_bytes_are_the_references(device: str, name: str, dtype: torch.dtype, heads: int) -> None:
    kv_format = FORMATS[name]
    scale = 0.37 if kv_format.has_layer_scales else 1.0
    x = some_values(heads).to(dtype)
    right = quantise(x, kv_format, scale, impl="reference")
    found = quantise(x.to(device), kv_format, scale, impl="triton")
    assert all(map(torch.equal, raw(found), raw(right)))
    back = dequantise(found, kv_format, scale, impl="triton")
    assert torch.equal(back.cpu(), dequantise(right, kv_format, scale, impl="reference"))


@each_name
@each_dtype
@on_devices("head_k, head_v", [(48, 16)], [(48, 16), (128, 128), (256, 256)])
def test_quantised_rows_are_stored_as_by_the_reference(
    device: str, name: str, dtype: torch.dtype, head_k: int, head_v: int
) -> None:
    head_sizes = head_k, head_v
    shape = {"blocks": 5, "heads": 3, "slots": 8, "head_sizes": head_sizes}
    right = bound(name, empty_cache(name, "LBNHC", **shape), head_sizes)  # type: ignore[arg-type]
    found = moved_cache(right, device)
    slots = torch.tensor([9, -1, 15, 16, 39, -1, 30])
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(7, 3, n, generator=draw).to(dtype) for n in head_sizes)
    store_kv(k, v, right, slots, impl="reference")
    store_kv(k.to(device), v.to(device), found, slots.to(device), impl="triton")
    for side, expected in ((found.k, right.k), (found.v, right.v)):
        assert all(map(torch.equal, raw(side), raw(expected)))


@each_batch
@each_name
@each_dtype
@on_devices("head_size", [32], [64, 128, 256])
def test_quantised_attention_matches_float64(
    device: str, name: str, dtype: torch.dtype, head_size: int, kind: str
) -> None:
    """Eight query heads a KV head."""
    sizes = {"head_size_k": head_size, "head_size_v": head_size}
    batch = make_batch(
        requests_of(kind, device), kv_index=(0,) * 8 + (1,) * 8, order="BHLNC", seed=1, **sizes
    )
    cache = quantised(batch, name, "BHLNC")
    batch.q = batch.q.to(dtype)
    assert_attends(batch, moved_cache(cache, device), head_size, dtype, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@on_devices(
    "head_size, group, window, total",
    [(64, 8, None, 600), (128, 1, 300, 520)],
    [
        (head_size, group, window, 3000)
        for head_size in (64, 128, 256)
        for group in (1, 4, 7, 8, 16)
        for window in (None, 1100)
    ],
)
def test_split_decode_matches_float64(
    device: str, head_size: int, group: int, window: int | None, total: int, dtype: torch.dtype
) -> None:
    """By the tiles and splits that an engine chooses: keys enough for several programs, beside few."""
    batch = make_batch(
        ((1, total), (1, 1), (1, 257)),
        kv_heads=1,
        kv_index=(0,) * group,
        order="LBHNC",
        head_size_k=head_size,
        head_size_v=head_size,
        window=window,
        dtype=dtype,
        seed=2,
    )
    assert_attends(batch, moved(batch.cache, device), head_size, dtype, what=f"{total} keys")


@each_batch
@each_dtype
@on_devices("num_heads, latent, rope", [(16, 64, 16)], [(16, 512, 64), (128, 512, 64)])
def test_deepseeks_latents_match_float64(
    device: str, dtype: torch.dtype, num_heads: int, latent: int, rope: int, kind: str
) -> None:
    requests = requests_of(kind, device)
    latents = make_latents(requests, num_heads=num_heads, latent=latent, rope=rope, dtype=dtype)
    latents.check(latents.run("triton", device), "latents")


@each_batch
@each_name
@on_devices("num_heads, latent, rope", [(16, 64, 16)], [(16, 512, 64), (128, 512, 64)])
def test_quantised_latents_match_float64(
    device: str, num_heads: int, latent: int, rope: int, name: str, kind: str
) -> None:
    requests = requests_of(kind, device)
    latents = make_latents(requests, num_heads=num_heads, latent=latent, rope=rope)
    cache = moved_cache(quantised(latents.batch, name, "BHLNC", (0.37, 0.37)), device)
    latents.q = latents.q.to(torch.bfloat16)
    latents.check(latents.run("triton", device, cache), name)


@pytest.mark.parametrize("is_alike", [True, False])
@on_devices("unit, most", [(unit, 40) for unit in (1, 8, 16)], [(u, 900) for u in (1, 2, 4, 8, 16, 64)])
def test_runs_are_copied_as_by_the_reference(device: str, unit: int, most: int, is_alike: bool) -> None:
    rng = np.random.default_rng(unit)
    lengths = [unit * most // 3] * 5 if is_alike else [unit * int(n) for n in rng.integers(1, most, 7)]
    runs, need = scattered_runs(rng, unit, lengths, num_blocks=6)
    source = torch.from_numpy(rng.integers(-128, 128, need[0] + 64).astype(np.int8))
    blocks = rng.integers(0, 6, 4), rng.permutation(6)[:4]
    copies = []
    for impl, place in (("reference", "cpu"), ("triton", device)):
        target = torch.full((need[1] + 64,), 0x5A, dtype=torch.int8, device=place)
        table = make_run_table(*np.ascontiguousarray(runs.T), torch.device(place))
        copy_runs(source.to(place), target, table, *blocks, impl=impl)
        copies.append(target.cpu())
    assert torch.equal(*copies)


@on_devices("tokens, heads", [(70, 2)], [(70, 2), (3000, 8)])
def test_all_kinds_of_caches_are_digested_as_by_the_reference(device: str, tokens: int, heads: int) -> None:
    """Attention, latents, and states of one long row, in one launch; codes with scales take another."""
    random = torch.Generator().manual_seed(tokens)
    rows, last = torch.arange(5, 5 + tokens), torch.tensor([4 + tokens])
    slot, zero = (rows - 5) % 16, torch.zeros(1, dtype=torch.int64)
    blocks = 1 + torch.randperm(1 + tokens // 16, generator=random)
    places = [
        RowPlaces(*(t.numpy() for t in (blocks[(rows - 5) // 16], slot, rows)), 0, 1 + (4 + tokens) // 64),
        RowPlaces(*(t.numpy() for t in (zero + 1, zero, last)), int(last) // 64, 1),
    ]
    num_blocks = len(blocks) + 1
    kinds = [
        # heads, slots, bytes of a row and between rows, dtype, fields, places
        (heads, 16, 512, 512, torch.bfloat16, ((0, 0, 128), (1, 128, 128)), 0),
        (1, 16, 1152, 1152, torch.bfloat16, ((2, 0, 512), (3, 512, 64)), 0),
        (heads, 1, 16384, 16400, torch.float32, ((7, 0, 4096),), 1),
        (heads, 1, 384, 384, torch.bfloat16, ((4, 0, 192),), 1),
        (heads, 16, 136, 136, torch.int8, ((0, 0, 64), (12, 64, 4), (1, 68, 64), (13, 132, 4)), 0),
    ]
    drawn, there = [], []
    for layer, (units, slots, row, stride, dtype, fields, _) in enumerate(kinds):
        memory = torch.randint(0, 100, (num_blocks * slots * units * stride,), generator=random).to(
            torch.int8
        )
        for views, place in ((drawn, "cpu"), (there, device)):
            whole = memory.to(place).view(num_blocks, slots, units, stride).transpose(1, 2)[..., :row]
            views.append(DigestedView(whole.view(dtype), layer, tuple(range(3, 3 + units)), fields))
    for first, stop in ((0, 4), (4, 5), (0, 5)):
        of = tuple(kind[-1] for kind in kinds[first:stop])
        expected = digest_views(
            DigestedViews(tuple(drawn[first:stop]), of), places, rows_per_group=64, impl="reference"
        )
        digested = DigestedViews(tuple(there[first:stop]), of)
        found = digest_views(digested, places, rows_per_group=64, impl="triton")
        assert torch.equal(found.cpu(), expected)
        assert len(digested.lane_tables) == (1 if stop <= 4 else 2)
