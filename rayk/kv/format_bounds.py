"""Upper bounds on the rounding error of KV formats. Free of torch.

Rounding to p bits of significand is off by at most 2^-p of a normal value, or half the smallest step below
the normal range. e4m3 has p = 4 (largest 448, normal from 2^-6, smallest step 2^-9), e2m1 p = 2 (largest 6,
normal from 1, smallest step 1/2). In nvfp4 a block's scale is the e4m3 nearest to amax / 6, itself off by up
to 1/17.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayk.kv.formats import E2M1_MAX, E4M3_MAX, E4M3_STEP, NVFP4_BLOCK, SMALLEST_SCALE, KVFormat

Floats = npt.NDArray[np.float64]


def error_bound(kv_format: KVFormat, values: Floats, scale: float = 1.0) -> Floats:
    """Return the most by which each of `values` [..., head elements] differs after a round trip. `scale` is
    the layer's scale, where the format has one."""
    size = np.abs(np.asarray(values, dtype=np.float64))
    # Scales and quotients are also rounded to float32: 2^-24 of a value that may be off by 2^-4.
    slack = 1 + 2.0**-18
    half_ulp = 2.0**-kv_format.significand_bits
    if kv_format.scales == "none":
        smallest = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}[kv_format.name]
        return np.maximum(np.maximum(half_ulp * size, smallest / 2), size - kv_format.element_max)
    if kv_format.scales == "block":
        return _block_bound(size, scale) * slack
    scales: Floats | float = scale
    if kv_format.scales == "token_head":
        scales = np.maximum(size.max(-1, keepdims=True) / E4M3_MAX, SMALLEST_SCALE)
    rounded = np.maximum(half_ulp * size, E4M3_STEP / 2 * scales)
    bound: Floats = np.maximum(rounded, size - E4M3_MAX * scales) * slack
    return bound


def _block_bound(size: Floats, scale: float) -> Floats:
    blocks = size.reshape(*size.shape[:-1], -1, NVFP4_BLOCK)
    scales = blocks.max(-1, keepdims=True) / E2M1_MAX
    off = np.maximum(scales * 2.0**-4, E4M3_STEP / 2 * scale)
    largest = np.minimum(scales + off, E4M3_MAX * scale)
    least = np.clip(scales - off, 0.0, E4M3_MAX * scale)
    rounded = np.maximum(blocks / 4, largest / 4)
    bound: Floats = np.maximum(rounded, blocks - E2M1_MAX * least).reshape(size.shape)
    return bound
