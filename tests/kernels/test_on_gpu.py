"""What the other kernel tests try in Triton's interpreter alone, or on small shapes, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rayk.kernels.copy_runs import copy_runs, make_run_table
from rayk.kernels.paged_attention import paged_attention
from rayk.kernels.quantise import Quantised, QuantisedKV, dequantise, quantise
from rayk.kernels.store_kv import store_kv
from rayk.kv.formats import FORMATS
from tests.helpers import assert_matches
from tests.kernels.cases import dense_attention, make_batch
from tests.kernels.quantised_cases import bound, empty_cache, quantised
from tests.kernels.state_cases import SELECTIVE, SSD, Op, World
from tests.kernels.test_copy_runs import scattered_runs
from tests.kernels.test_gated_delta_rule import DELTA
from tests.kernels.test_mla_attention import make_latents
from tests.kernels.test_quantise import some_values
from tests.markers import gpu

pytestmark = gpu
QUANTISED = ("fp8_e4m3", "fp8_e4m3_token_head", "nvfp4")
MIXED = ((1, 1), (1, 300), (7, 7), (90, 400), (1, 64))
DECODES = ((1, 1), (1, 700), (1, 64), (1, 65))


def moved(view: Tensor) -> Tensor:
    """The same view of its whole storage, on the GPU."""
    storage = torch.tensor([], dtype=view.dtype).set_(view.untyped_storage()).cuda()
    return storage.as_strided(view.shape, view.stride(), view.storage_offset())


def moved_cache(cache: QuantisedKV) -> QuantisedKV:
    sides = {
        name: Quantised(moved(side.data), None if side.scales is None else moved(side.scales))
        for name, side in (("k", cache.k), ("v", cache.v))
    }
    return replace(cache, **sides)


def raw(side: Quantised) -> list[Tensor]:
    return [x.cpu().contiguous().view(torch.uint8) for x in side if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_bytes_are_the_references(name: str, dtype: torch.dtype) -> None:
    kv_format = FORMATS[name]
    scale = 0.37 if kv_format.has_layer_scales else 1.0
    x = some_values().to(dtype)
    right = quantise(x, kv_format, scale, impl="reference")
    found = quantise(x.cuda(), kv_format, scale, impl="triton")
    assert all(map(torch.equal, raw(found), raw(right)))
    back = dequantise(found, kv_format, scale, impl="triton")
    assert torch.equal(back.cpu(), dequantise(right, kv_format, scale, impl="reference"))


@pytest.mark.parametrize("head_sizes", [(48, 16), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_rows_are_stored_as_by_the_reference(
    name: str, dtype: torch.dtype, head_sizes: tuple[int, int]
) -> None:
    shape = {"blocks": 5, "heads": 3, "slots": 8, "head_sizes": head_sizes}
    right = bound(name, empty_cache(name, "LBNHC", **shape), head_sizes)  # type: ignore[arg-type]
    found = moved_cache(right)
    slots = torch.tensor([9, -1, 15, 16, 39, -1, 30])
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(7, 3, n, generator=draw).to(dtype) for n in head_sizes)
    store_kv(k, v, right, slots, impl="reference")
    store_kv(k.cuda(), v.cuda(), found, slots.cuda(), impl="triton")
    for side, expected in ((found.k, right.k), (found.v, right.v)):
        assert all(map(torch.equal, raw(side), raw(expected)))


@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_attention_matches_float64(
    name: str, dtype: torch.dtype, head_size: int, requests: tuple[tuple[int, int], ...]
) -> None:
    """Eight query heads a KV head."""
    sizes = {"head_size_k": head_size, "head_size_v": head_size}
    batch = make_batch(requests, kv_index=(0,) * 8 + (1,) * 8, order="BHLNC", seed=1, **sizes)
    cache = quantised(batch, name, "BHLNC")
    batch.q = batch.q.to(dtype)
    q, _, *rest = batch.arguments()
    scale = head_size**-0.5
    out = paged_attention(
        q.cuda(),
        moved_cache(cache),
        *(x.cuda() for x in rest),
        scale=scale,
        window=None,
        head_size_k=head_size,
        impl="triton",
    )
    exact, eager = (dense_attention(batch, d, scale) for d in (torch.float64, dtype))
    assert_matches(out.cpu(), exact, eager, what=name)


@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deepseeks_latents_match_float64(
    dtype: torch.dtype, num_heads: int, requests: tuple[tuple[int, int], ...]
) -> None:
    latents = make_latents(requests, num_heads=num_heads, latent=512, rope=64, dtype=dtype)
    latents.check(latents.run("triton", "cuda"), "latents")


PRODUCTION = (
    replace(SELECTIVE, unit_shape=(8, 128, 16)),
    replace(SSD, unit_shape=(8, 64, 128)),
    replace(SSD, unit_shape=(4, 64, 256)),
    replace(SSD, unit_shape=(4, 128, 64)),
    replace(DELTA, unit_shape=(4, 128, 128)),
    replace(DELTA, unit_shape=(4, 64, 64)),
    replace(DELTA, unit_shape=(4, 32, 32)),
)
each_state = pytest.mark.parametrize(
    "op", PRODUCTION, ids=lambda op: "-".join(map(str, (op.name, *op.unit_shape)))
)


@each_state
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_of_released_sizes(op: Op, dtype: torch.dtype) -> None:
    """By chunks of tensor cores' products; more than one chunk, also of one that goes on."""
    world = World(op, [130, 40], 1000, dtype, "triton", "cuda")
    world.step([(0, 100)])
    world.step([(0, 29), (1, 38)])
    world.step([(0, 1), (1, 2)])
    world.finish(tight=False)


@each_state
@pytest.mark.parametrize("block_size", [64, 96, 1000])
def test_chunks_end_with_their_segments(op: Op, block_size: int) -> None:
    """Whole chunks, and chunks with one token more or less, from states before; beside single tokens."""
    world = World(op, [257, 130, 64, 3], block_size, torch.float16, "triton", "cuda")
    world.step([(0, 64), (1, 65), (3, 1)])
    world.step([(0, 128), (1, 1), (2, 63), (3, 1)], fork=True)
    world.step([(0, 65), (1, 64), (2, 1), (3, 1)], keep="last")
    world.finish(tight=False)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("is_alike", [True, False])
def test_runs_are_copied_as_by_the_reference(unit: int, is_alike: bool) -> None:
    rng = np.random.default_rng(unit)
    lengths = [unit * 300] * 5 if is_alike else [unit * int(n) for n in rng.integers(1, 900, 7)]
    runs, need = scattered_runs(rng, unit, lengths, num_blocks=6)
    source = torch.from_numpy(rng.integers(-128, 128, need[0] + 64).astype(np.int8))
    blocks = rng.integers(0, 6, 4), rng.permutation(6)[:4]
    copies = []
    for impl, device in (("reference", "cpu"), ("triton", "cuda")):
        target = torch.full((need[1] + 64,), 0x5A, dtype=torch.int8, device=device)
        table = make_run_table(*np.ascontiguousarray(runs.T), torch.device(device))
        copy_runs(source.to(device), target, table, *blocks, impl=impl)
        copies.append(target.cpu())
    assert torch.equal(*copies)
