"""Matrices of packed integers, packed and read by the formats' definitions: the reference for the readers.

Written apart from rayk/models/formats, in numpy, one integer at a time and in float64. What it reads is held
to what gptqmodel, autoawq, compressed-tensors and nvidia-modelopt packed (tests/models/packed).

GPTQ: gptqmodel 7.7 nn_modules/qlinear/__init__.py (pack_original) and utils/model.py (version 1's zeros).
AWQ: AutoAWQ 0.2.9 awq/modules/linear/gemm.py (from_linear). pack-quantized: compressed-tensors 0.20
compressors/pack_quantized. nvfp4: nvidia-modelopt 0.47 torch/quantization/qtensor/nvfp4_tensor.py.

Shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Words = npt.NDArray[np.int32]
WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs that a word's nibbles hold, from the lowest."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack(codes: npt.NDArray[np.int64], bits: int, order: Sequence[int] | None = None) -> Words:
    """Pack codes [a, b] into words [a, b * bits / 32, rounded up], from the lowest bits; `order`: the code of
    each eight that stands at each place."""
    per_word = WORD_BITS // bits
    places = range(per_word) if order is None else order
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint64)
    for word in range(words.shape[1]):
        for shift, place in enumerate(places):
            if word * per_word + place < codes.shape[1]:
                words[:, word] |= codes[:, word * per_word + place].astype(np.uint64) << np.uint64(
                    shift * bits
                )
    return words.astype(np.uint32).view(np.int32)


def unpack(words: Words, bits: int, size: int, order: Sequence[int] | None = None) -> npt.NDArray[np.int64]:
    """Return the codes [a, size] of words [a, b]; `pack` the other way."""
    per_word = WORD_BITS // bits
    places = tuple(range(per_word) if order is None else order)
    wide = words.astype(np.int64) & 0xFFFFFFFF
    codes = np.zeros((words.shape[0], size), np.int64)
    for index in range(size):
        shift = places.index(index % per_word) * bits
        codes[:, index] = wide[:, index // per_word] >> shift & (1 << bits) - 1
    return codes


def scaled(
    codes: npt.NDArray[np.int64], zeros: npt.NDArray[np.int64], scales: Array, groups: npt.NDArray[np.int64]
) -> Array:
    """Return (codes [O, I] - zeros [O, G]) * scales [O, G], `groups` [I] being each input's."""
    return np.asarray((codes - zeros[:, groups]) * scales[:, groups].astype(np.float64), np.float64)


def neighbours(inputs: int, group_size: int | None) -> npt.NDArray[np.int64]:
    """Return each input's group where neighbours share one."""
    return np.arange(inputs) // (group_size or inputs)


def read_gptq(
    tensors: Mapping[str, npt.NDArray[np.generic]], bits: int, group_size: int | None, version: int = 1
) -> Array:
    """Return the matrix [O, I] of `qweight`, `qzeros`, `scales` and `g_idx` (else of neighbours)."""
    words, scales = tensors["qweight"].astype(np.int32), tensors["scales"].astype(np.float64)
    inputs, outputs = words.shape[0] * WORD_BITS // bits, words.shape[1]
    zeros = tensors["qzeros"].astype(np.int64) & 0xFFFFFFFF
    if version == 1:
        ones = sum(1 << shift for shift in range(0, WORD_BITS, bits))
        zeros = zeros + ones & 0xFFFFFFFF
    index = tensors.get("g_idx")
    groups = neighbours(inputs, group_size) if index is None else index.astype(np.int64)
    points = unpack(zeros.astype(np.uint32).view(np.int32), bits, outputs)
    return scaled(unpack(words.T, bits, inputs), points.T, scales.T, groups)


def write_gptq(
    codes: npt.NDArray[np.int64],
    zeros: npt.NDArray[np.int64],
    scales: Array,
    bits: int,
    *,
    groups: npt.NDArray[np.int64],
    version: int = 1,
) -> dict[str, npt.NDArray[np.generic]]:
    """Pack codes [O, I], zeros and scales [O, G] with each input's group."""
    points = pack(zeros.T, bits).view(np.uint32).astype(np.int64)
    if version == 1:
        points = points - sum(1 << shift for shift in range(0, WORD_BITS, bits)) & 0xFFFFFFFF
    return {
        "qweight": np.ascontiguousarray(pack(codes, bits).T),
        "qzeros": points.astype(np.uint32).view(np.int32),
        "scales": np.ascontiguousarray(scales.T.astype(np.float16)),
        "g_idx": groups.astype(np.int32),
    }


def read_awq(tensors: Mapping[str, npt.NDArray[np.generic]], group_size: int | None) -> Array:
    """Return the matrix [O, I] of `qweight`, `qzeros` and `scales`."""
    scales = tensors["scales"].astype(np.float64)
    codes = unpack(tensors["qweight"].astype(np.int32), 4, scales.shape[1], AWQ_ORDER).T
    zeros = unpack(tensors["qzeros"].astype(np.int32), 4, scales.shape[1], AWQ_ORDER).T
    return scaled(codes, zeros, scales.T, neighbours(codes.shape[1], group_size))


def write_awq(
    codes: npt.NDArray[np.int64], zeros: npt.NDArray[np.int64], scales: Array
) -> dict[str, npt.NDArray[np.generic]]:
    """Pack codes [O, I], zeros and scales [O, G]."""
    return {
        "qweight": pack(codes.T, 4, AWQ_ORDER),
        "qzeros": pack(zeros.T, 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(scales.T.astype(np.float16)),
    }


def read_packed(tensors: Mapping[str, npt.NDArray[np.generic]], bits: int, group_size: int | None) -> Array:
    """Return the matrix [O, I] of `weight_packed`, `weight_scale`, `weight_shape`, of `weight_zero_point`
    unless symmetric, and of `weight_g_idx` where groups are not of neighbours."""
    outputs, inputs = (int(side) for side in tensors["weight_shape"])
    scales = tensors["weight_scale"].astype(np.float64)
    codes = unpack(tensors["weight_packed"].astype(np.int32), bits, inputs)
    points = np.full(scales.shape, 1 << bits - 1)
    if "weight_zero_point" in tensors:
        points = unpack(tensors["weight_zero_point"].astype(np.int32).T, bits, outputs).T
    index = tensors.get("weight_g_idx")
    groups = neighbours(inputs, group_size) if index is None else index.astype(np.int64)
    return scaled(codes, points, scales, groups)


def read_nvfp4(codes: npt.NDArray[np.uint8], scales: Array, scale: float) -> Array:
    """Return the matrix [O, I] of `weight` [O, I / 2] (two e2m1 per byte, the lower half first),
    `weight_scale` [O, I / 16] and the scale of those. Their product is rounded to float32, as modelopt
    multiplies them."""
    values = np.array([*E2M1, *(-value for value in E2M1)])
    halves = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    by_group = (scales.astype(np.float32) * np.float32(scale)).astype(np.float64)
    return values[halves] * np.repeat(by_group, 16, 1)


def affine(
    weight: Array, bits: int, groups: npt.NDArray[np.int64], *, symmetric: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
    """Round a matrix [O, I] to codes [O, I], zero points and float16 scales [O, G] by each group's range."""
    num, top = int(groups.max()) + 1, (1 << bits) - 1
    scales, zeros = np.zeros((len(weight), num)), np.zeros((len(weight), num), np.int64)
    for group in range(num):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scale = np.maximum((high - low) / top, 2.0**-14).astype(np.float16).astype(np.float64)
        scales[:, group] = scale
        zeros[:, group] = 1 << bits - 1 if symmetric else np.clip(np.round(-low / scale), 0, top)
    codes = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, top).astype(np.int64)
    return codes, zeros, scales
