"""Writes new keys and values into their slots of the paged KV cache."""

from __future__ import annotations

import torch

from rayk.kernels.quantise import QuantisedKV
from rayk.kernels.store_kv.native import is_native, store_kv_native
from rayk.kernels.store_kv.reference import store_kv_reference


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor | QuantisedKV,
    slot_mapping: torch.Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Store k [T, H, Dk] and v [T, H, Dv] at slot_mapping [T] int64 of kv_cache [B, H, N, C]. Slot -1 stores
    nothing.

    In a quantised cache the stored bytes depend on the token alone, not on prefill chunks or the batch.

    `impl`: reference, native or triton; None takes triton on CUDA, else native where it can.
    """
    if impl is None:
        impl = "triton" if kv_cache.is_cuda else "native" if is_native(k, v, kv_cache) else "reference"
    if impl == "native":
        assert is_native(k, v, kv_cache), "the native kernel does not take these"
        assert not isinstance(kv_cache, QuantisedKV)
        store_kv_native(k, v, kv_cache, slot_mapping)
    elif impl == "triton":
        from rayk.kernels.store_kv.triton import store_kv_triton

        store_kv_triton(k, v, kv_cache, slot_mapping)
    else:
        assert impl == "reference", f"unknown store_kv implementation {impl!r}"
        store_kv_reference(k, v, kv_cache, slot_mapping)
