"""Keys and values into a quantised KV format, and back. What the formats are stands in kv.formats.

Rounding is to nearest, ties to even, and saturates; a quotient is that of float32. NaN and infinities are NaN
in e4m3; in a format whose scales are computed, one makes all that share its scale NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.kernels.quantise.cache import QuantisedKV, head_size_v, quantised_kv
from rayk.kernels.quantise.reference import Quantised, dequantise_reference, quantise_reference

if TYPE_CHECKING:
    import torch

    from rayk.kv.formats import KVFormat

__all__ = ["Quantised", "QuantisedKV", "dequantise", "head_size_v", "quantise", "quantised_kv"]


def quantise(
    values: torch.Tensor, kv_format: KVFormat, scale: float = 1.0, *, impl: str | None = None
) -> Quantised:
    """values [..., D], any float dtype: their stored elements and scales (see Quantised), as one side (k or
    v) of a format keeps them. D is a head: a format's scales never reach beyond it.

    `scale`: the layer's, where the format has one (kv_format.has_layer_scales): stored is value / scale.
    `impl`: reference or triton; None takes triton on CUDA. All give the same bytes.
    """
    if (impl or ("triton" if values.is_cuda else "reference")) == "reference":
        return quantise_reference(values, kv_format, scale)
    from rayk.kernels.quantise.launch import quantise_triton

    return quantise_triton(values, kv_format, scale)


def dequantise(
    stored: Quantised,
    kv_format: KVFormat,
    scale: float = 1.0,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """The values [..., D] in `dtype` (None: float32). `stored` may be views of any strides.

    Element, scale in the page and the layer's scale are multiplied in float32 (in float64 where that is the
    dtype), and rounded to the dtype once.
    """
    if (impl or ("triton" if stored.data.is_cuda else "reference")) == "reference":
        return dequantise_reference(stored, kv_format, scale, dtype)
    from rayk.kernels.quantise.launch import dequantise_triton

    return dequantise_triton(stored, kv_format, scale, dtype)
