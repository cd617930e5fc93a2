"""KV formats: how the keys and values of one (head, token) become bytes, and how accurate they are.

A latent cache stores a latent and a rotated key in their place, for a single head.

Plain formats store elements unchanged. Quantised ones store elements that are multiplied by a scale:

 - one float32 per layer and side (k or v), outside the pages: it comes with the checkpoint and travels in the
   handshake (`fp8_e4m3`, and the global scale of `nvfp4`); a latent and its rotated key share one;
 - one float32 per (head, token) and side, in the page (`fp8_e4m3_token_head`);
 - one e4m3 per 16 elements, in the page (`nvfp4`: NVIDIA, "Introducing NVFP4", developer.nvidia.com, 2025).

Rounding is to nearest, ties to even, and saturates: finite values stay finite. Infinity and NaN become NaN in
every quantised format, through the element or its scale.

`format_bounds` bounds the rounding error. Free of torch and numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rayk.kv.fields import ITEMSIZE
from rayk.types.errors import Unsupported

E4M3_MAX = 448.0
E4M3_STEP = 2.0**-9
"""Spacing of the smallest values, and the smallest value above 0."""
E2M1_MAX = 6.0
NVFP4_BLOCK = 16
"""Elements that share a scale."""
SMALLEST_SCALE = 2.0**-126
"""Scale of a (head, token) whose values are all close to zero: the smallest normal float32."""

LATENT_SIDES = ("latent", "rope")
"""The two parts that a latent cache keeps per token: a latent vector and a rotated key."""

Granularity = Literal["none", "tensor", "token_head", "block"]


@dataclass(frozen=True, slots=True)
class StoredField:
    """One field of a format, as stored per (head, token)."""

    name: str
    """A key of FIELD_IDS: a side (k, v, latent or rope), or a side with `_scale` appended."""
    dtype: str
    """A key of ITEMSIZE."""
    row_bytes: int
    bundle: str


@dataclass(frozen=True, slots=True)
class KVFormat:
    name: str
    storage: str
    """Dtype (a key of ITEMSIZE) of stored elements; uint8 packs two 4-bit elements, the first low."""
    significand_bits: int
    """Significand bits of an element, the leading one included."""
    element_max: float
    """Largest finite element."""
    scales: Granularity
    """Which elements share a scale; none: the format has no scales."""

    @property
    def is_quantised(self) -> bool:
        return self.scales != "none"

    @property
    def has_layer_scales(self) -> bool:
        """Whether the format has a float32 scale per layer and side outside the pages."""
        return self.scales in ("tensor", "block")

    def fields(
        self, head_size_k: int, head_size_v: int, sides: tuple[str, str] = ("k", "v")
    ) -> tuple[StoredField, ...]:
        """Return what a (head, token) stores, in page order. Raises Unsupported for head sizes that the
        format cannot hold. `sides` names what is kept in place of key and value, e.g. LATENT_SIDES."""
        sizes = dict(zip(sides, (head_size_k, head_size_v), strict=True))
        kept = "latents" if sides == LATENT_SIDES else "heads"
        if self.scales == "block":
            if any(size % NVFP4_BLOCK for size in sizes.values()):
                raise Unsupported(
                    f"{self.name} of {kept} of {head_size_k} and {head_size_v} elements: "
                    f"{NVFP4_BLOCK} elements share a scale (mend: kv_dtype fp8_e4m3 or auto)"
                )
            return tuple(
                field
                for side, size in sizes.items()
                for field in (
                    StoredField(side, "uint8", size // 2, side),
                    StoredField(f"{side}_scale", "float8_e4m3fn", size // NVFP4_BLOCK, side),
                )
            )
        data = tuple(
            StoredField(side, self.storage, size * ITEMSIZE[self.storage], "kv")
            for side, size in sizes.items()
        )
        if self.scales != "token_head":
            return data
        width = ITEMSIZE["float32"]
        if (head_size_k + head_size_v) % width:
            raise Unsupported(
                f"{self.name} of {kept} of {head_size_k} and {head_size_v} elements: "
                f"their scales would not start at a multiple of {width} bytes (mend: kv_scales: tensor)"
            )
        return (*data, *(StoredField(f"{side}_scale", "float32", width, "kv") for side in sizes))

    def elements(self, row_bytes: int) -> int:
        """Count the elements of a k (or v) that takes `row_bytes` bytes."""
        return row_bytes * 2 if self.scales == "block" else row_bytes // ITEMSIZE[self.storage]

    def data_bytes(self, elements: int) -> int:
        """Count the bytes of a k (or v) of `elements` elements, without scales."""
        return elements // 2 if self.scales == "block" else elements * ITEMSIZE[self.storage]

    def row_bytes(self, head_size_k: int, head_size_v: int) -> int:
        """Count the bytes of one (head, token), scales in the page included."""
        return sum(f.row_bytes for f in self.fields(head_size_k, head_size_v))


_FORMATS = (
    KVFormat("float32", "float32", 24, (2 - 2.0**-23) * 2.0**127, "none"),
    KVFormat("bfloat16", "bfloat16", 8, (2 - 2.0**-7) * 2.0**127, "none"),
    KVFormat("float16", "float16", 11, 65504.0, "none"),
    KVFormat("fp8_e4m3", "float8_e4m3fn", 4, E4M3_MAX, "tensor"),
    KVFormat("fp8_e4m3_token_head", "float8_e4m3fn", 4, E4M3_MAX, "token_head"),
    KVFormat("nvfp4", "uint8", 2, E2M1_MAX, "block"),
)

FORMATS: Mapping[str, KVFormat] = MappingProxyType({f.name: f for f in _FORMATS})


def engine_format(dtype: str, kv_dtype: str, kv_scales: str) -> str:
    """Name of an engine's KV format, from the model's dtype and the engine's settings."""
    if kv_dtype == "auto":
        return dtype
    return "fp8_e4m3_token_head" if (kv_dtype, kv_scales) == ("fp8_e4m3", "token_head") else kv_dtype
