"""Backends store latents and rotated keys, then attend to them, beside layers with keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayk.attention import (
    AttentionBackend,
    AttentionParams,
    CommonAttentionMetadata,
    MlaParams,
    get_backend,
)
from rayk.kv.specs import GatedDeltaNetSpec, MlaSpec
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.cases import AXIS_ORDERS, Batch, make_batch
from tests.markers import interpreted

BACKENDS = ("cpu", "cpu-torch", "reference", pytest.param("triton", marks=interpreted))
MIXED = ((1, 1), (1, 38), (7, 7), (9, 40))
LATENT, ROPE, HEADS = 24, 8, 3


def latents(order: str = "BLHNC", **options) -> Batch:
    """One head, whose keys are the latents and values the rotated keys; without this step's rows."""
    sizes = {"head_size_k": LATENT, "head_size_v": ROPE, "block_size": 8}
    return make_batch(MIXED, order=order, kv_heads=1, kv_index=(0,), store_new=False, **sizes | options)


def common_of(batch: Batch) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_host(
        query_lens=[n for n, _ in batch.requests],
        seq_lens=[total for _, total in batch.requests],
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
        block_size=batch.cache.shape[-2],
    )


def queries(batch: Batch) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(len(batch.q), HEADS, LATENT + ROPE, generator=generator)
    return q.to(batch.q.dtype)


def forward(name: str | AttentionBackend, batch: Batch, q: Tensor, window: int | None = None) -> Tensor:
    new = [
        torch.cat([rows[total - n :, 0] for (n, total), rows in zip(batch.requests, packed, strict=True)])
        for packed in (batch.keys, batch.values)
    ]
    backend = get_backend(name, "cpu") if isinstance(name, str) else name
    metadata = backend.build(common_of(batch), window)
    return backend.forward_latent(q, *new, batch.cache[:, 0], metadata, MlaParams(0.2, LATENT, ROPE))


def dense(batch: Batch, q: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, Q, R]: token by token over what it sees."""
    outs, t = [], 0
    for (num_queries, total), keys, values in zip(batch.requests, batch.keys, batch.values, strict=True):
        rows = torch.cat([keys, values], -1)[:, 0].to(dtype)
        for end in range(total - num_queries + 1, total + 1):
            weights = (q[t].to(dtype) @ rows[:end].mT * 0.2).softmax(-1)
            outs.append(weights @ rows[:end, :LATENT])
            t += 1
    return torch.stack(outs)


@each("order", AXIS_ORDERS)
@pytest.mark.parametrize("name", BACKENDS)
def test_stores_then_attends(name: str, order: str) -> None:
    """This step's rows reach the cache only through the backend, as they are, and nothing else does."""
    batch = latents(order)
    before = batch.cache.clone()
    q = queries(batch)
    out = forward(name, batch, q)
    assert_matches(out, dense(batch, q, torch.float64), dense(batch, q, torch.float32), what=name)
    position = 0
    for (num_queries, total), keys, values in zip(batch.requests, batch.keys, batch.values, strict=True):
        for i in range(total - num_queries, total):
            block, slot = divmod(int(batch.slot_mapping[position]), 8)
            before[block, 0, slot] = torch.cat([keys[i, 0], values[i, 0]])
            position += 1
    assert torch.equal(batch.cache.nan_to_num(7e7), before.nan_to_num(7e7))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kernel_block_size", [2, 1])
def test_kernel_blocks_of_another_size(name: str, kernel_block_size: int) -> None:
    batch = latents(kernel_block_size=kernel_block_size)
    q = queries(batch)
    out = forward(name, batch, q)
    assert_matches(out, dense(batch, q, torch.float64), dense(batch, q, torch.float32), what=name)


@pytest.mark.parametrize("name", BACKENDS)
def test_16_bit_caches(name: str) -> None:
    batch = latents(dtype=torch.bfloat16)
    q = queries(batch)
    exact, eager = dense(batch, q, torch.float64), dense(batch, q, torch.bfloat16)
    assert_matches(forward(name, batch, q), exact, eager, what=name, tight=True)


def test_a_padding_token_is_not_stored() -> None:
    batch = latents()
    batch.slot_mapping[0] = -1
    forward("reference", batch, queries(batch))
    # Neither where the token belongs nor in the null block.
    assert bool(batch.cache[[0, int(batch.block_table[0, 0])]].isnan().all())


def test_a_window_is_refused() -> None:
    batch = latents()
    with pytest.raises(AssertionError, match="no window"):
        forward("reference", batch, queries(batch), window=4)


def test_one_backend_serves_both_kinds_of_layer() -> None:
    """And shares its kept memory between them."""
    backend = get_backend("cpu-torch", "cpu")
    batch, plain = latents(), make_batch(MIXED, block_size=8)
    q = queries(batch)
    metadata = backend.build(common_of(plain), None)
    params = AttentionParams(0.25, None, torch.tensor(plain.kv_index), 16, 16)
    k = torch.cat([keys[total - n :] for (n, total), keys in zip(MIXED, plain.keys, strict=True)])
    v = torch.cat([values[total - n :] for (n, total), values in zip(MIXED, plain.values, strict=True)])
    first = backend.forward(plain.q, k, v, plain.cache, metadata, params)
    exact, eager = dense(batch, q, torch.float64), dense(batch, q, torch.float32)
    assert_matches(forward(backend, batch, q), exact, eager)
    assert torch.equal(backend.forward(plain.q, k, v, plain.cache, metadata, params), first)


@pytest.mark.parametrize("name", ["cpu", "reference", pytest.param("triton", marks=interpreted)])
def test_vetoes(name: str) -> None:
    backend = get_backend(name, "cpu")
    assert backend.veto("BLHNC", MlaSpec(16, 512, 64, "bfloat16", 16)) is None
    assert "float8" in (backend.veto("BLHNC", MlaSpec(16, 512, 64, "float8_e4m3fn", 16)) or "")
    state = GatedDeltaNetSpec(64, "bfloat16", 4, 2, 16, 4, 16)
    assert "conv_q" in (backend.veto("BLHNC", state) or "")
    for sizes in ((513, 64), (512, 65)):
        why = backend.veto("LBNHC", MlaSpec(16, *sizes, "float32", 16))
        assert (why is not None) == (name == "triton")
        assert why is None or str(sizes) in why
