"""A paged cache as the Triton attention kernels take it."""

from __future__ import annotations

import math
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
            assert self.alignment % 4 == 0, "rows are whole float32s"

    @property
    def alignment(self) -> int:
        """The greatest power of two of at most 16 elements that every address of a row is a multiple of."""
        common = 16
        for view in (self.keys, self.values):
            if view is not None:
                common = math.gcd(common, view.data_ptr() // view.element_size(), *view.stride()[:3])
        return common

    def strides(self) -> tuple[int, ...]:
        """Strides of blocks, heads and slots of keys, then of values (zeros if none), in alignments."""
        values = (0, 0, 0) if self.values is None else self.values.stride()[:3]
        return tuple(stride // self.alignment for stride in (*self.keys.stride()[:3], *values))


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
