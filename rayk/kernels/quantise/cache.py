"""A paged cache of quantised keys and values in the form kernels take. Latents and rotated keys stand in the
place of the keys and values of a single head.

Legend: B kernel blocks, H head slots, N token slots of a block, D elements of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rayk.kernels.quantise.reference import Quantised, dequantise_reference
from rayk.kv.formats import FORMATS, KVFormat, StoredField


@dataclass(frozen=True, eq=False)
class QuantisedKV:
    """One layer's cache: views of its pages, and the layer's scales. Made by `quantised_kv`."""

    kv_format: KVFormat
    head_size_k: int
    head_size_v: int
    k: Quantised
    """Views [B, H, N, ...] of any strides, the last axis dense."""
    v: Quantised
    k_scale: float
    """The layer's scale, where the format has one; else 1."""
    v_scale: float
    sides: tuple[str, str] = ("k", "v")
    """Names of k and v in FIELD_IDS."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, H, N)."""
        b, h, n, _ = self.k.data.shape
        return b, h, n

    @property
    def device(self) -> torch.device:
        return self.k.data.device

    @property
    def is_cuda(self) -> bool:
        return self.k.data.is_cuda

    def fields(self) -> dict[str, torch.Tensor]:
        """Return every field of the pages, by its name in FIELD_IDS: [B, H, N, elements], typed."""
        found: dict[str, torch.Tensor] = {}
        for name, side in zip(self.sides, (self.k, self.v), strict=True):
            found[name] = side.data
            if side.scales is not None:
                found[f"{name}_scale"] = side.scales
        return found

    @staticmethod
    def raw(side: Quantised) -> tuple[torch.Tensor, torch.Tensor | None]:
        """View data and scales as bytes (float32 scales unchanged), for kernels that decode them."""
        scales = side.scales
        if scales is not None and scales.dtype != torch.float32:
            scales = scales.view(torch.uint8)
        return side.data.view(torch.uint8), scales

    def gather(
        self, blocks: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys [n, H, Dk] and values [n, H, Dv] of n tokens by their blocks and slots [n] int64."""

        def pick(view: torch.Tensor | None) -> torch.Tensor | None:
            return None if view is None else view[blocks, :, slots]

        k, v = (Quantised(side.data[blocks, :, slots], pick(side.scales)) for side in (self.k, self.v))
        return (
            dequantise_reference(k, self.kv_format, self.k_scale, dtype),
            dequantise_reference(v, self.kv_format, self.v_scale, dtype),
        )


def quantised_kv(
    view: torch.Tensor | Mapping[str, torch.Tensor],
    head_size_k: int,
    head_size_v: int,
    scales: tuple[float, float] = (1.0, 1.0),
    sides: tuple[str, str] = ("k", "v"),
) -> QuantisedKV | None:
    """Return a layer's bound view (kv.caches.CacheView) in the form kernels take; None if elements are plain
    values.

    The view shows the format: e4m3 elements; bytes followed by scales; or two bundles of bytes, one per side.
    `scales`: the layer's for k and v. `sides`: what is kept in their place.
    """
    if isinstance(view, Mapping):
        assert set(view) == set(sides), f"bundles {sorted(view)}, not {' and '.join(sides)}"
        kv_format = FORMATS["nvfp4"]
        bundles = dict(view)
    elif view.dtype in (torch.float8_e4m3fn, torch.uint8):
        kv_format = FORMATS["fp8_e4m3" if view.dtype == torch.float8_e4m3fn else "fp8_e4m3_token_head"]
        bundles = {"kv": view}
    else:
        return None
    typed = _split(bundles, kv_format.fields(head_size_k, head_size_v, sides))
    k, v = (Quantised(typed[side], typed.get(f"{side}_scale")) for side in sides)
    layer = scales if kv_format.has_layer_scales else (1.0, 1.0)
    return QuantisedKV(kv_format, head_size_k, head_size_v, k, v, *layer, sides)


def head_size_v(kv_cache: torch.Tensor | QuantisedKV, head_size_k: int) -> int:
    """Count the elements of a value in a cache [B, H, N, K then V], or a quantised one."""
    return kv_cache.head_size_v if isinstance(kv_cache, QuantisedKV) else kv_cache.shape[-1] - head_size_k


def _split(bundles: Mapping[str, torch.Tensor], fields: Sequence[StoredField]) -> dict[str, torch.Tensor]:
    """Cut the bundles [B, H, N, bytes] into their fields, each in its own dtype."""
    typed: dict[str, torch.Tensor] = {}
    ends = dict.fromkeys(bundles, 0)
    for field in fields:
        bundle, start = bundles[field.bundle], ends[field.bundle]
        ends[field.bundle] = start + field.row_bytes
        dtype = getattr(torch, field.dtype)
        typed[field.name] = bundle.view(torch.uint8)[..., start : start + field.row_bytes].view(dtype)
    for name, bundle in bundles.items():
        assert bundle.shape[-1] == ends[name], f"{bundle.shape[-1]} bytes of {name}, not {ends[name]}"
    return typed
