"""Converts keys and values into a quantised KV format (see kv.formats), and back.

Rounding is to nearest, ties to even, and saturates; quotients are float32. NaN and infinity become NaN in
e4m3; where scales are computed, one of them makes all values that share its scale NaN.
"""

from __future__ import annotations

import torch

from rayk.kernels.dispatch import default_impl
from rayk.kernels.quantise.cache import QuantisedKV, head_size_v, quantised_kv
from rayk.kernels.quantise.reference import Quantised, dequantise_reference, quantise_reference
from rayk.kv.formats import KVFormat

__all__ = ["Quantised", "QuantisedKV", "dequantise", "head_size_v", "quantise", "quantised_kv"]


def quantise(
    values: torch.Tensor, kv_format: KVFormat, scale: float = 1.0, *, impl: str | None = None
) -> Quantised:
    """Stored elements and scales of values [..., D], any float dtype, as one side (k or v) of a format keeps
    them. D is a head; scales never reach beyond it.

    `scale`: the layer's scale, by which values are divided, if the format has one. `impl`: reference or
    triton; None takes triton on CUDA. Both give the same bytes.
    """
    if (impl or default_impl(values.is_cuda)) != "triton":
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
    """Return the values [..., D] in `dtype` (None: float32). `stored` may be views of any strides.

    Element, scale in the page and layer scale are multiplied in float32 (float64 if that is the dtype) and
    rounded once.
    """
    if (impl or default_impl(stored.data.is_cuda)) != "triton":
        return dequantise_reference(stored, kv_format, scale, dtype)
    from rayk.kernels.quantise.launch import dequantise_triton

    return dequantise_triton(stored, kv_format, scale, dtype)
