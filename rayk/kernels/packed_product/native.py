"""Matrix products with a packed weight in C++ (native.cpp)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from rayk.kernels.native import NativeKernels

PANEL = 32  # outputs of a panel: kPanel
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_ARGUMENTS = (_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _INT, _INT)
_KERNELS = NativeKernels(Path(__file__).with_name("native.cpp"), {"rayk_packed_product": _ARGUMENTS})
why_no_native = _KERNELS.why_not
"""Why this machine cannot run the C++ kernel, or None if it can. Builds it on first use."""


def is_packable(weight: torch.Tensor) -> bool:
    """Tell whether the kernel takes products with this weight [out, in], and has no betters."""
    if not weight.is_cpu or weight.dtype not in _TYPES or why_no_native() is not None:
        return False
    if 16 * (-len(weight) % PANEL) > len(weight):
        return False  # more than a sixteenth would be filled up
    return weight.dtype == torch.float32 or (weight.shape[1] % 2 == 0 and not _has_tiles())


@functools.cache
def _has_tiles() -> bool:
    """Tell whether the CPU has AMX: torch's products use it, and in 16 bits are several times as fast."""
    return bool(torch.cpu._is_amx_tile_supported())


def _empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def pack(
    weight: torch.Tensor, empty: Callable[[torch.Size, torch.dtype], torch.Tensor] = _empty
) -> torch.Tensor:
    """Copy [out, in] into panels of 32 outputs: [panel, in, 32], or [panel, in / 2, 32, 2] in 16 bits. The
    outputs that fill the last panel up are zero. `empty` allocates them, dense."""
    num_outputs, num_inputs = weight.shape
    filled = F.pad(weight, (0, 0, 0, -num_outputs % PANEL))
    at_once = 4 // weight.element_size()
    steps = filled.view(-1, PANEL, num_inputs // at_once, at_once).transpose(1, 2)
    panels = empty(steps.shape, weight.dtype).copy_(steps)
    return panels if at_once > 1 else panels.squeeze(3)


def packed_product(
    x: torch.Tensor, panels: torch.Tensor, num_outputs: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply x [T, in] by the weight^T that `pack` took, and add the bias [out]: [T, out]. Sums are in
    float32, each in the same order whatever T."""
    num_inputs = panels.shape[1] * (panels.shape[3] if panels.dim() == 4 else 1)
    assert x.dim() == 2, x.shape
    assert x.shape[1] == num_inputs, (x.shape, panels.shape)
    assert x.dtype == panels.dtype, (x.dtype, panels.dtype)
    assert panels.shape[0] == -(-num_outputs // PANEL), (panels.shape, num_outputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        assert bias.dtype == x.dtype, (bias.dtype, x.dtype)
        assert bias.shape == (num_outputs,), bias.shape
        bias = bias.contiguous()
    out = torch.empty((len(x), num_outputs), dtype=x.dtype)
    _KERNELS.library.rayk_packed_product(
        x.data_ptr(),
        x.stride(0),
        panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        len(x),
        num_inputs,
        num_outputs,
        _TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out
