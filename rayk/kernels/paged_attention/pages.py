"""A paged cache as the Triton attention kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayk.kernels.quantise import QuantisedKV


@dataclass(frozen=True)
class KernelPages:
    """Views of a cache; latents and rotated keys stand in the place of the keys and values of one head."""

    keys: torch.Tensor
    """[B, H, N, ...]: keys, then values unless they lie elsewhere. Quantised caches are viewed as bytes."""
    values: torch.Tensor | None = None
    token_scales: torch.Tensor | None = None
    scales: str = "none"
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        for view in (self.keys, self.values):
            if view is not None:
                assert view.stride(-1) == 1, "the content axis must be dense"
                assert (view.shape[2] - 1) * view.stride(2) < 2**31, "offsets inside a block are 32-bit"
        if self.token_scales is not None:
            assert all(s % 4 == 0 for s in self.keys.stride()[:3]), "rows are whole float32s"


def kernel_pages(kv_cache: torch.Tensor | QuantisedKV) -> KernelPages:
    """Describe the pages of a cache [B, H, N, C] for a kernel."""
    if not isinstance(kv_cache, QuantisedKV):
        return KernelPages(kv_cache)
    (keys, scales), (values, _) = kv_cache.raw(kv_cache.k), kv_cache.raw(kv_cache.v)
    kind = kv_cache.kv_format.scales
    return KernelPages(
        keys,
        values if kind == "block" else None,
        scales if kind == "token_head" else None,
        kind,
        kv_cache.k_scale,
        kv_cache.v_scale,
    )
