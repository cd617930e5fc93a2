"""The Triton kernels alone: splits of a decode step, odd heads and groups, bad block ids, huge caches.

What every implementation must do is in test_paged_attention and test_sinks_and_soft_cap. Here the kernels
run in Triton's interpreter; on a machine with a GPU the same checks run compiled (`make test-gpu`).
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rayk.kernels.interpreter import index_of
from rayk.kernels.paged_attention import head_groups, launch
from rayk.kernels.paged_attention.launch import paged_attention_triton, split_workspace_elements
from rayk.kernels.paged_attention.tiles import MAX_SPLITS, Tiles, choose_num_splits, choose_tiles
from rayk.kernels.store_kv import store_kv
from rayk.kernels.target import TARGETS, Target, target_named
from tests.helpers import assert_matches
from tests.kernels.cases import AXIS_ORDERS, Batch, count_marks, dense_attention, make_batch, num_seen
from tests.markers import gpu, interpreted

ON = [
    pytest.param("cpu", marks=interpreted, id="interpreter"),
    pytest.param("cuda", marks=gpu, id="gpu"),
]
NARROW = Tiles(16, 16, 4, 1)
"""Small tiles: many of them, also in short sequences."""
DECODES = ((1, 1), (1, 100), (1, 64))
MIXED = ((1, 1), (1, 38), (7, 7), (50, 70), (1, 64))


def run(batch: Batch, device: str = "cpu", *, scale: float = 0.25, **options: object) -> Tensor:
    """Through the launcher, with the cache's storage moved as it lies."""
    q, cache, *rest, kv_index = batch.arguments()
    storage = torch.tensor([], dtype=cache.dtype).set_(cache.untyped_storage()).to(device)
    cache = storage.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    return paged_attention_triton(
        q.to(device),
        cache,
        *(t.to(device) for t in rest),
        groups=head_groups(kv_index.to(device)),
        scale=scale,
        window=batch.window,
        head_size_k=batch.head_size_k,
        **options,
    ).cpu()


def check(batch: Batch, device: str, what: str, **options: object) -> None:
    """Against float64; in the interpreter, whose products are float32, by the tight rule."""
    softmax = {k: v for k, v in options.items() if k in ("sinks", "soft_cap")}
    scale = batch.head_size_k**-0.5
    actual = run(batch, device, scale=scale, **options)
    exact = dense_attention(batch, torch.float64, scale, **softmax)
    eager = dense_attention(batch, batch.q.dtype, scale, **softmax)
    assert_matches(actual, exact, eager, what=what, tight=device == "cpu")


def sinks_of(batch: Batch) -> Tensor:
    return torch.linspace(-2, 3, len(batch.kv_index))


# (number of splits, window, sinks, soft cap, dtype, layout): every pair of neighbours' values occurs.
SPLITS = [
    (1, None, True, None, torch.float32, "LBHNC"),
    (2, None, False, 2.0, torch.bfloat16, "BLHNC"),
    (3, 40, True, 2.0, torch.float32, "LHBNC"),
    (5, 1, True, None, torch.float16, "BHLNC"),
    (7, 17, False, None, torch.bfloat16, "BLNHC"),
    (9, None, True, 2.0, torch.float32, "LBNHC"),
    (8, 90, False, 2.0, torch.float16, "BHLNC"),
    (2, 16, False, None, torch.float32, "BLHNC"),
]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(("num_splits", "window", "has_sinks", "soft_cap", "dtype", "order"), SPLITS)
def test_split_decode_matches_float64(
    device: str,
    num_splits: int,
    window: int | None,
    has_sinks: bool,
    soft_cap: float | None,
    dtype: torch.dtype,
    order: str,
    poisoned_empty: None,
) -> None:
    """Poisoned memory: what a split without keys leaves behind must not count."""
    batch = make_batch(DECODES, order=order, block_size=8, window=window, dtype=dtype, head_size_v=24)
    sinks = sinks_of(batch) if has_sinks else None
    check(batch, device, f"{num_splits}", sinks=sinks, soft_cap=soft_cap, num_splits=num_splits, tiles=NARROW)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("window", [None, 37])
def test_split_decode_counts_every_token_once(device: str, window: int | None) -> None:
    batch = make_batch(((1, 130), (1, 16)), kv_index=(1, 0), window=window, marks=True)
    for num_splits in (2, 4, 9):
        out = run(batch, device, num_splits=num_splits, tiles=NARROW)
        assert torch.equal((out * num_seen(batch)).round().long(), count_marks(batch)), num_splits


@pytest.mark.parametrize("device", ON)
def test_more_splits_than_the_combining_kernel_takes_at_once(device: str) -> None:
    """34 splits with keys, of 36: two turns of its loop."""
    batch = make_batch(((1, 540),), kv_heads=1, kv_index=(0, 0))
    # The last key is what head 0 looks for: the second turn finds a greater maximum.
    batch.keys[0][-1, 0] = 2 * batch.q[0, 0]
    block, slot = divmod(int(batch.slot_mapping[0]), 16)
    batch.cache[block, 0, slot, :16] = batch.keys[0][-1, 0]
    check(batch, device, "36 splits", num_splits=36, tiles=NARROW, sinks=sinks_of(batch))


@pytest.mark.parametrize("device", ON)
def test_the_workspace_may_be_the_callers(device: str) -> None:
    """Exactly what was asked for is written; poison elsewhere stays, and what it held does not matter."""
    batch = make_batch(DECODES)
    needed = split_workspace_elements(len(DECODES), 4, 16, 3)
    workspace = torch.full((needed + 8,), float("nan")).to(device)
    expected = run(batch, device, num_splits=3, tiles=NARROW)
    assert torch.equal(run(batch, device, num_splits=3, tiles=NARROW, workspace=workspace), expected)
    assert workspace[needed:].isnan().all()
    assert workspace[:needed].isfinite().any()


@pytest.mark.parametrize("device", ON)
def test_a_request_without_keys_gets_zeros(device: str) -> None:
    batch = make_batch(((1, 20), (1, 20)))
    lens = torch.tensor([20, 0], dtype=torch.int32)
    q, cache, table, starts, _, kv_index = batch.arguments()
    for num_splits in (1, 2):
        expected = run(batch, device, num_splits=num_splits, tiles=NARROW)
        out = paged_attention_triton(
            q.to(device),
            cache.to(device),
            table.to(device),
            starts.to(device),
            lens.to(device),
            groups=head_groups(kv_index.to(device)),
            scale=0.25,
            window=None,
            head_size_k=16,
            num_splits=num_splits,
            tiles=NARROW,
        ).cpu()
        assert torch.equal(out[0], expected[0])
        assert torch.equal(out[1], torch.zeros_like(out[1]))


# Dk, Dv, query heads of each KV head (uneven where they differ), requests, window, sinks and cap, dtype.
HEADS = [
    (80, 80, (0, 0, 0, 1, 1, 1), MIXED, None, False, torch.float32),
    (96, 96, (1, 0, 1, 1, 0, 1, 1), MIXED, 30, True, torch.bfloat16),
    (112, 64, (0,) * 16, MIXED, None, True, torch.float16),
    (160, 160, (0, 1), DECODES, 30, False, torch.float16),
    (192, 128, (0, 0, 0, 0, 0, 1, 1, 1), MIXED, 30, False, torch.float32),
    (192, 128, (0,) * 7, DECODES, None, True, torch.bfloat16),
    (256, 256, (1, 0, 0, 0), MIXED, None, True, torch.bfloat16),
    (40, 72, (0,) * 40, MIXED, None, False, torch.float16),
    (16, 256, (0, 1, 1, 1, 1, 1), DECODES, None, True, torch.float32),
]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(("dk", "dv", "kv_index", "requests", "window", "capped", "dtype"), HEADS)
def test_head_sizes_and_groups(
    device: str,
    dk: int,
    dv: int,
    kv_index: tuple[int, ...],
    requests: tuple[tuple[int, int], ...],
    window: int | None,
    capped: bool,
    dtype: torch.dtype,
) -> None:
    batch = make_batch(
        requests, head_size_k=dk, head_size_v=dv, kv_index=kv_index, window=window, dtype=dtype, order="BHLNC"
    )
    softmax = {"sinks": sinks_of(batch), "soft_cap": 2.0} if capped else {}
    check(batch, device, f"{dk}/{dv}", **softmax)


@pytest.mark.parametrize("device", ON)
def test_a_tile_writes_its_own_tokens_and_no_more(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows are 5 tokens of 3 heads and a row left over, which another program would have to race with."""
    kernel = launch.paged_attention_kernel

    class FirstProgram:
        def __getitem__(self, grid: tuple[int]) -> object:
            return kernel[(1,)]

    batch = make_batch(((30, 30),), kv_heads=1, kv_index=(0, 0, 0))
    monkeypatch.setattr(launch, "paged_attention_kernel", FirstProgram())
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, 99.0, **options))
    out = run(batch, device, tiles=NARROW)
    assert (out[:5].abs() < 10).all()
    assert (out[5:] == 99).all()


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_long_prefills_on_the_gpu(head_size: int, window: int | None, dtype: torch.dtype) -> None:
    for order in AXIS_ORDERS:
        batch = make_batch(
            ((300, 1500), (1, 900), (129, 129)),
            order=order,
            head_size_k=head_size,
            head_size_v=head_size,
            kv_index=(0, 0, 0, 0, 1, 1, 1),
            window=window,
            dtype=dtype,
        )
        check(batch, "cuda", order)
        check(batch, "cuda", order, sinks=sinks_of(batch), soft_cap=5.0)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("block", [-1, 10**6, torch.iinfo(torch.int32).max])
@pytest.mark.parametrize("requests", [((1, 70), (1, 60)), ((9, 70), (20, 60))], ids=["decode", "prefill"])
def test_a_block_id_outside_the_cache_is_not_followed(
    device: str, requests: tuple[tuple[int, int], ...], block: int
) -> None:
    """Every query that sees the block gets NaN, and no other."""
    batch = make_batch(requests)
    expected = run(batch, device)
    batch.block_table[0, 2] = block
    out = run(batch, device)
    first = requests[0][0]
    assert out[:first].isnan().all()
    assert torch.equal(out[first:], expected[first:])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("device", ON)
def test_a_sequence_longer_than_its_block_table_is_not_followed(device: str) -> None:
    batch = make_batch(((9, 70), (20, 60)))
    batch.block_table = batch.block_table[:, :4].contiguous()  # 64 tokens: request 0 needs 70
    out = run(batch, device, tiles=NARROW)
    # Its queries at positions 61, 62 and 63 see nothing beyond the table.
    assert out[:3].isfinite().all()
    assert out[3:9].isnan().all()
    assert out[9:].isfinite().all()


@pytest.mark.parametrize("device", ON)
def test_store_kv_leaves_out_slots_outside_the_cache(device: str) -> None:
    view = torch.full((3, 2, 4, 8), float("nan")).to(device)
    k = torch.ones(4, 2, 4).to(device)
    store_kv(k, k, view, torch.tensor([12, 5, 2**40, -7]).to(device), impl="triton")
    assert view.isfinite().sum() == 2 * 8
    assert view[1, :, 1].isfinite().all()


def virtual_halves(num_elements: int) -> Tensor:
    """Float16 zeros that take memory only where they are touched."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python from 3.12
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, num_elements * 2, flags=flags), dtype=torch.float16)


@interpreted
@pytest.mark.parametrize("requests", [((5, 7), (1, 3)), ((1, 7), (1, 3))], ids=["prefill", "decode"])
def test_offsets_beyond_32_bits(requests: tuple[tuple[int, int], ...]) -> None:
    """Block 2 starts at element 2^31 of a cache whose strides fit 32 bits."""
    stride_b = 2**30
    storage = virtual_halves(2 * stride_b + 2**16)
    cache = storage.as_strided((3, 2, 8, 32), (stride_b, 8 * 32, 32, 1))
    batch = make_batch(requests, block_size=8, dtype=torch.float16)
    batch.block_table[:, 0] = torch.tensor([2, 1])
    k, v = torch.cat(batch.keys), torch.cat(batch.values)
    store_kv(k, v, cache, torch.cat([torch.arange(16, 23), torch.arange(8, 11)]), impl="triton")
    content = torch.cat([batch.keys[0], batch.values[0]], -1).transpose(0, 1)
    assert torch.equal(cache[2, :, :7], content)
    assert torch.equal(storage[2 * stride_b :][:32], content[0, 0])
    huge = replace(batch, cache=cache)
    check(huge, "cpu", "huge cache")


def test_splits_fill_the_device_and_no_more() -> None:
    """Whole waves of what it holds at once, 132 x 4, and no second one where keys are few."""

    def choose(num_programs: int, max_keys: int, target: Target = TARGETS["sm_90"], at_once: int = 4) -> int:
        return choose_num_splits(
            target,
            num_programs=num_programs,
            max_keys=max_keys,
            tile_keys=32,
            programs_at_once=at_once,
        )

    assert choose(1, 100) == 1, "too few keys"
    assert choose(528, 10**6) == choose(512, 8192) == 1, "the device is full"
    assert choose(1, 10**9) == MAX_SPLITS
    assert choose(16, 32_768) == 32
    assert choose(64, 8192) == 8
    assert choose(64, 8192, at_once=1) == 2
    assert choose(16, 32_768, target_named("sm_90", 20)) == 5
    # One program too many would wait for a whole wave of others: shorter ones fill the second.
    assert choose(529, 8192) > 1


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_tiles_hold_a_group_and_16_bit_prefills_a_warp_group(target: object) -> None:
    for group_size in (1, 3, 16, 71):
        for row_elements in (16, 128, 256):
            for itemsize in (2, 4):
                for decode_only in (False, True):
                    tiles = choose_tiles(
                        target,
                        decode_only=decode_only,
                        group_size=group_size,
                        row_elements=row_elements,
                        itemsize=itemsize,
                    )
                    assert tiles.rows >= group_size
                    assert tiles.rows >= 64 or decode_only or itemsize == 4


def test_an_unknown_gpu_gets_the_least_shared_memory_of_its_vendor() -> None:
    for name in ("sm_999", "gfx9999"):
        known = [t for t in TARGETS.values() if t.name[:2] == name[:2]]
        assert target_named(name, 7).shared_bytes == min(t.shared_bytes for t in known)
        assert target_named(name, 7).num_multiprocessors == 7


def test_an_interpreted_scalar_is_an_index() -> None:
    """As Triton's interpreter keeps it; `int` of the array is an error in NumPy 2.4."""
    assert index_of(SimpleNamespace(handle=SimpleNamespace(data=np.array([7])))) == 7
