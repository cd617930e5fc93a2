"""store_kv by plain indexing: the definition, and fast enough for a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """kv_cache[slot // N, :, slot % N] = k | v for every token whose slot is not -1. Any strides."""
    num_slots = kv_cache.shape[2]
    head_size_k = k.shape[-1]
    assert kv_cache.shape[-1] == head_size_k + v.shape[-1], "content is keys then values"
    assert k.shape[1] == v.shape[1] == kv_cache.shape[1], "one head slot per local KV head"
    stored = slot_mapping >= 0
    if not bool(stored.all()):
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    blocks, offsets = slot_mapping // num_slots, slot_mapping % num_slots
    # The index tensors stand on either side of a slice, so the token axis comes first: [T, H, D].
    kv_cache[blocks, :, offsets, :head_size_k] = k.to(kv_cache.dtype)
    kv_cache[blocks, :, offsets, head_size_k:] = v.to(kv_cache.dtype)
