"""Batches of attention tests whose cache is quantised: rows are written byte by byte, by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rayk.kernels.quantise import QuantisedKV, dequantise, quantise, quantised_kv
from rayk.kv.formats import FORMATS
from tests.kernels.cases import Batch, layer_view

SCALES = (0.37, 1.75)
"""Of keys and of values, in formats with scales of the layer."""


def empty_cache(
    name: str, order: str, *, blocks: int, heads: int, slots: int, head_sizes: tuple[int, int]
) -> dict[str, Tensor]:
    """Bundle -> its poisoned bytes [B, H, N, row bytes]."""
    bundles: dict[str, int] = {}
    for field in FORMATS[name].fields(*head_sizes):
        bundles[field.bundle] = bundles.get(field.bundle, 0) + field.row_bytes
    return {
        bundle: layer_view(
            order, blocks=blocks, heads=heads, slots=slots, content=num_bytes, dtype=torch.uint8
        )
        for bundle, num_bytes in bundles.items()
    }


def bound(
    name: str, bundles: dict[str, Tensor], head_sizes: tuple[int, int], scales: tuple[float, float] = SCALES
) -> QuantisedKV:
    """The cache as kernels take it, from what a layer would bind."""
    view: Tensor | dict[str, Tensor] = bundles
    if set(bundles) == {"kv"}:
        view = bundles["kv"]
        view = view.view(torch.float8_e4m3fn) if name == "fp8_e4m3" else view
    cache = quantised_kv(view, *head_sizes, scales)
    assert cache is not None
    assert cache.kv_format.name == name
    return cache


def row_bytes(name: str, k: Tensor, v: Tensor, scales: tuple[float, float] = SCALES) -> dict[str, Tensor]:
    """Bundle -> the bytes [..., row bytes] of keys [..., Dk] and values [..., Dv]."""
    kv_format = FORMATS[name]
    used = scales if kv_format.has_layer_scales else (1.0, 1.0)
    k_stored, v_stored = (quantise(x, kv_format, s) for x, s in zip((k, v), used, strict=True))
    found = {"k": k_stored.data, "k_scale": k_stored.scales, "v": v_stored.data, "v_scale": v_stored.scales}
    rows: dict[str, list[Tensor]] = {}
    for field in kv_format.fields(k.shape[-1], v.shape[-1]):
        stored = found[field.name]
        assert stored is not None
        rows.setdefault(field.bundle, []).append(stored.view(torch.uint8))
    return {bundle: torch.cat(parts, dim=-1) for bundle, parts in rows.items()}


def places(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """(request, position, kernel block, slot) of every token that lies in the cache."""
    slots = batch.cache.shape[2]
    for r, (_, total) in enumerate(batch.requests):
        for position in range(total):
            block = int(batch.block_table[r, position // slots])
            if block:
                yield r, position, block, position % slots


def quantised(batch: Batch, name: str, order: str, scales: tuple[float, float] = SCALES) -> QuantisedKV:
    """The batch's tokens in a quantised cache; the batch's dense keys and values become what it holds."""
    cache = cached(batch, name, order, places(batch), batch.cache.shape[2], scales)
    round_dense(batch, name, scales)
    return cache


def cached(
    batch: Batch,
    name: str,
    order: str,
    at: Iterable[tuple[int, int, int, int]],
    slots: int,
    scales: tuple[float, float] = SCALES,
) -> QuantisedKV:
    """A cache with blocks of so many slots, that holds the tokens at these `places` and no other."""
    blocks, heads, _, _ = batch.cache.shape
    sizes = batch.head_size_k, batch.values[0].shape[-1]
    bundles = empty_cache(name, order, blocks=blocks, heads=heads, slots=slots, head_sizes=sizes)
    rows = [row_bytes(name, k, v, scales) for k, v in zip(batch.keys, batch.values, strict=True)]
    for r, position, block, slot in at:
        for bundle, view in bundles.items():
            for head in range(heads):
                view[block, head, slot] = rows[r][bundle][position, head]
    return bound(name, bundles, sizes, scales)


def round_dense(batch: Batch, name: str, scales: tuple[float, float] = SCALES) -> None:
    """Make the batch's dense keys and values what a cache of this format holds of them."""
    kv_format = FORMATS[name]
    used = scales if kv_format.has_layer_scales else (1.0, 1.0)
    for dense, scale in ((batch.keys, used[0]), (batch.values, used[1])):
        for r, x in enumerate(dense):
            dense[r] = dequantise(quantise(x, kv_format, scale), kv_format, scale, dtype=torch.float64)
