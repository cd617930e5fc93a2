"""What a KV format is: how the keys and values of one (head, token) become bytes, and how far off they are.

A latent cache has a latent and a rotated key in their place, of a single head.

Plain formats hold elements as they are. Quantised ones hold `element * scale`, with scales of three kinds:

- one per layer and side of the cache (k or v), float32, that no page holds: of the checkpoint, told in the
  handshake (`fp8_e4m3`, and as the global scale of `nvfp4`); a latent and its rotated key share one;
- one per (head, token) and side, float32, in the page (`fp8_e4m3_token_head`);
- one per 16 elements, e4m3, in the page (`nvfp4`: NVIDIA, "Introducing NVFP4", developer.nvidia.com, 2025).

Rounding is to nearest, ties to even, and saturates: nothing finite becomes infinite or NaN. What is either is
NaN in every quantised format: by itself, or by its scale.

How far off values are after a round trip is `format_bounds`'. Free of torch and numpy.
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
"""Distance of the smallest values, and the smallest above 0."""
E2M1_MAX = 6.0
NVFP4_BLOCK = 16
"""Elements that share a scale."""
SMALLEST_SCALE = 2.0**-126
"""Of a (head, token) whose values are all (nearly) zero: the smallest normal float32."""

LATENT_SIDES = ("latent", "rope")
"""What a latent cache keeps of a token: a latent vector and a rotated key."""

Granularity = Literal["none", "tensor", "token_head", "block"]


@dataclass(frozen=True, slots=True)
class StoredField:
    """One field of a format: what is stored per (head, token), for a head of `elements` elements."""

    name: str
    """A key of FIELD_IDS: a side (k or v, latent or rope), or one with `_scale` behind it."""
    dtype: str
    """A key of ITEMSIZE."""
    row_bytes: int
    bundle: str
    """See PageField."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One way of keeping keys and values."""

    name: str
    """What specs of a cache call their dtype."""
    storage: str
    """Dtype (a key of ITEMSIZE) of stored elements; uint8 holds two of 4 bits, the first in the low one."""
    significand_bits: int
    """Of an element, the leading one included."""
    element_max: float
    """The largest finite element."""
    scales: Granularity
    """What shares a scale that is in the page or told beside it; none: elements are the values."""
    worst_relative_error: float
    """The most that a value is off, where it and its block's scale are in the normal range and do not
    saturate: divided by the value; where scales are computed (token_head, block), by the largest that shares
    its own."""

    @property
    def is_quantised(self) -> bool:
        """Whether values are divided by scales before they are stored."""
        return self.scales != "none"

    @property
    def has_layer_scales(self) -> bool:
        """Whether a float32 per layer and side multiplies what pages hold."""
        return self.scales in ("tensor", "block")

    def fields(
        self, head_size_k: int, head_size_v: int, sides: tuple[str, str] = ("k", "v")
    ) -> tuple[StoredField, ...]:
        """What a (head, token) holds, in page order. Raises Unsupported for head sizes it cannot hold.

        `sides`: what is kept in place of a key and a value, LATENT_SIDES maybe.
        """
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
        """Elements of a head whose k, or v, takes so many bytes."""
        return row_bytes * 2 if self.scales == "block" else row_bytes // ITEMSIZE[self.storage]

    def data_bytes(self, elements: int) -> int:
        """Bytes of a k, or a v, of so many elements, without scales."""
        return elements // 2 if self.scales == "block" else elements * ITEMSIZE[self.storage]

    def row_bytes(self, head_size_k: int, head_size_v: int) -> int:
        """Bytes of one (head, token), scales in the page included."""
        return sum(f.row_bytes for f in self.fields(head_size_k, head_size_v))


def _worst(significand_bits: int) -> float:
    """Half a unit in the last place, just above a power of two: 2^-p of 1 + 2^-p."""
    return 1 / (2.0**significand_bits + 1)


_FORMATS = (
    KVFormat("float32", "float32", 24, (2 - 2.0**-23) * 2.0**127, "none", _worst(24)),
    KVFormat("bfloat16", "bfloat16", 8, (2 - 2.0**-7) * 2.0**127, "none", _worst(8)),
    KVFormat("float16", "float16", 11, 65504.0, "none", _worst(11)),
    KVFormat("fp8_e4m3", "float8_e4m3fn", 4, E4M3_MAX, "tensor", _worst(4)),
    # The largest becomes 448, and steps above 256 are 32.
    KVFormat("fp8_e4m3_token_head", "float8_e4m3fn", 4, E4M3_MAX, "token_head", 16 / E4M3_MAX),
    # Between 4 and 6 steps are 2: off by 1, times a scale that is amax / 6 and itself off.
    KVFormat("nvfp4", "uint8", 2, E2M1_MAX, "block", (1 + _worst(4)) / E2M1_MAX),
)

FORMATS: Mapping[str, KVFormat] = MappingProxyType({f.name: f for f in _FORMATS})
"""Every format that a cache may have, by name."""


def engine_format(dtype: str, kv_dtype: str, kv_scales: str) -> str:
    """Name of the format that an engine keeps: `dtype` is the model's, the others the engine's settings."""
    if kv_dtype == "auto":
        return dtype
    return "fp8_e4m3_token_head" if (kv_dtype, kv_scales) == ("fp8_e4m3", "token_head") else kv_dtype
