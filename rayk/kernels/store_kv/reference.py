"""store_kv by plain indexing: the definition, and fast enough for a CPU."""

from __future__ import annotations

import torch

from rayk.kernels.quantise.cache import QuantisedKV
from rayk.kernels.quantise.reference import quantise_reference


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor | QuantisedKV, slot_mapping: torch.Tensor
) -> None:
    """kv_cache[slot // N, :, slot % N] = k | v for every token whose slot is not -1. Any strides."""
    num_slots = kv_cache.shape[2]
    assert k.shape[1] == v.shape[1] == kv_cache.shape[1], "one head slot per local KV head"
    stored = slot_mapping >= 0
    if not bool(stored.all()):
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    blocks, offsets = slot_mapping // num_slots, slot_mapping % num_slots
    # The index tensors stand on either side of a slice, so the token axis comes first: [T, H, D].
    if isinstance(kv_cache, QuantisedKV):
        _store_quantised(k, v, kv_cache, blocks, offsets)
        return
    head_size_k = k.shape[-1]
    assert kv_cache.shape[-1] == head_size_k + v.shape[-1], "content is keys then values"
    kv_cache[blocks, :, offsets, :head_size_k] = k.to(kv_cache.dtype)
    kv_cache[blocks, :, offsets, head_size_k:] = v.to(kv_cache.dtype)


def _store_quantised(
    k: torch.Tensor, v: torch.Tensor, cache: QuantisedKV, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    for values, side, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        stored = quantise_reference(values, cache.kv_format, scale)
        assert stored.data.shape[-1] == side.data.shape[-1], (values.shape, side.data.shape)
        side.data[blocks, :, offsets] = stored.data
        if side.scales is not None and stored.scales is not None:
            side.scales[blocks, :, offsets] = stored.scales
