"""store_kv in C++ (native.cpp): one call instead of a dozen of torch's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from rayk.kernels.native import NativeKernels
from rayk.kernels.quantise import QuantisedKV

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_ARGUMENTS = (
    (_POINTER, _LONG, _LONG) * 2 + (_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _INT) + (_LONG,) * 4
)
_KERNELS = NativeKernels(Path(__file__).with_name("native.cpp"), {"rayk_store_kv": _ARGUMENTS}, _INT)
why_no_native = _KERNELS.why_not
"""Why this machine cannot run the C++ kernel, or None if it can. Builds it on first use."""


def is_native(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor | QuantisedKV) -> bool:
    """Tell whether the kernel takes these: on a CPU, of one dtype, with dense rows."""
    return (
        not isinstance(kv_cache, QuantisedKV)
        and kv_cache.is_cpu
        and k.dtype == v.dtype == kv_cache.dtype
        and k.stride(-1) == v.stride(-1) == kv_cache.stride(-1) == 1
        and why_no_native() is None
    )


def store_kv_native(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    num_blocks, num_heads, num_slots, content = kv_cache.shape
    num_tokens, itemsize = len(slot_mapping), kv_cache.element_size()
    assert k.shape[:2] == v.shape[:2] == (num_tokens, num_heads), "one head slot per local KV head"
    assert k.shape[2] + v.shape[2] == content, "content is keys then values"
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    stride_b, stride_h, stride_n, _ = kv_cache.stride()
    status = _KERNELS.library.rayk_store_kv(
        k.data_ptr(),
        k.stride(0) * itemsize,
        k.stride(1) * itemsize,
        v.data_ptr(),
        v.stride(0) * itemsize,
        v.stride(1) * itemsize,
        kv_cache.data_ptr(),
        stride_b * itemsize,
        stride_h * itemsize,
        stride_n * itemsize,
        slot_mapping.data_ptr(),
        num_tokens,
        num_heads,
        k.shape[2] * itemsize,
        v.shape[2] * itemsize,
        num_blocks,
        num_slots,
    )
    assert status == 0, "a slot is out of range"
