"""Write new keys and values into their slots of the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.kernels.store_kv.reference import store_kv_reference

if TYPE_CHECKING:
    import torch

    from rayk.kernels.quantise import QuantisedKV

__all__ = ["store_kv", "store_kv_reference"]


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor | QuantisedKV,
    slot_mapping: torch.Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Store k [T, H, Dk] and v [T, H, Dv] at slot_mapping [T] int64 of kv_cache [B, H, N, C].

    A quantised cache keeps them as its format does: what a token becomes depends on nothing but the token, so
    that neither chunks of a prompt nor the batch change a byte. A slot of -1 stores nothing.

    `impl`: reference or triton; None takes triton on CUDA, else reference.
    """
    if impl is None:
        impl = "triton" if kv_cache.is_cuda else "reference"
    if impl == "triton":
        from rayk.kernels.store_kv.triton import store_kv_triton

        store_kv_triton(k, v, kv_cache, slot_mapping)
    else:
        assert impl == "reference", f"unknown store_kv implementation {impl!r}"
        store_kv_reference(k, v, kv_cache, slot_mapping)
