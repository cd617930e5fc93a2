"""The best token of each row in C++ (native.cpp): one call in place of seven."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from rayk.kernels.native import NativeKernels

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_KERNELS = NativeKernels(
    Path(__file__).with_name("native.cpp"), {"rayk_best_tokens": (_POINTER, _LONG, _LONG, _LONG, _POINTER)}
)


def is_native(logits: torch.Tensor) -> bool:
    """Tell whether the kernel takes these: dense rows on a CPU, where it can be built."""
    return logits.is_cpu and logits.stride(1) == 1 and _KERNELS.why_not() is None


def best_tokens_native(logits: torch.Tensor) -> torch.Tensor:
    num_rows, num_tokens = logits.shape
    assert num_tokens, "no token to choose"
    out = torch.empty(num_rows, dtype=torch.int64)
    _KERNELS.library.rayk_best_tokens(
        logits.data_ptr(), logits.stride(0), num_rows, num_tokens, out.data_ptr()
    )
    return out
