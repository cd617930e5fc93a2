"""Pointwise steps in C++ (native.cpp): one call in place of three to seven, some 3 us each."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from rayk.kernels.native import NativeKernels

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Activations that the kernel has, by its number for them."""
PAIRINGS = {"halves": 0, "pairs": 1, "into_halves": 2}
"""What turns together in a rotation, by the kernel's number for it."""
ORDERS = {"gate_norm": 0, "norm_gate": 1, "plain": 2}
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "rayk_rms_norm": (_POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _LONG)
    + (_INT, _INT, _FLOAT, _INT, _INT, _INT, _INT),
    "rayk_gated_norm": (_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG)
    + (_INT, _INT, _FLOAT, _INT, _INT, _INT, _INT),
    "rayk_rotate": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG)
    + (_INT, _INT, _INT, _INT, _INT, _INT, _INT),
    "rayk_gate": (_POINTER, _LONG, _POINTER, _LONG, _INT, _INT, _INT, _INT),
    "rayk_add": (_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _INT, _INT, _INT),
}


_KERNELS = NativeKernels(Path(__file__).with_name("native.cpp"), _ARGUMENTS)
why_no_native = _KERNELS.why_not
"""Why this machine cannot run the C++ kernels, or None if it can. Builds them on first use."""


def is_native(x: torch.Tensor) -> bool:
    """Tell whether the kernels take x: [T, D] or [T, H, D], rows dense, float32 or bfloat16, on a CPU."""
    return (
        x.is_cpu and x.dtype in _TYPES and x.dim() in (2, 3) and x.stride(-1) == 1 and why_no_native() is None
    )


def rms_norm_native(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    wide: bool,
    centred: bool = False,
    added: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm x, less its mean if `centred`, or x + `added` [T, D], which goes to `total`."""
    num_heads, stride_h = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    out = torch.empty(x.shape, dtype=x.dtype)
    pointer, stride_w = None, 0
    if weight is not None:
        assert weight.dtype == (torch.float32 if wide else x.dtype), (weight.dtype, x.dtype, wide)
        assert weight.shape[-1] == x.shape[-1], (weight.shape, x.shape)
        assert weight.stride(-1) == 1
        pointer = weight.data_ptr()
        if weight.dim() == 2:
            assert weight.shape[0] == num_heads, (weight.shape, x.shape)
            stride_w = weight.stride(0)
    _KERNELS.library.rayk_rms_norm(
        x.data_ptr(),
        x.stride(0),
        stride_h,
        pointer,
        stride_w,
        None if added is None else added.data_ptr(),
        None if total is None else total.data_ptr(),
        0 if added is None else added.stride(0),
        out.data_ptr(),
        x.shape[0],
        num_heads,
        x.shape[-1],
        eps,
        centred,
        wide,
        _TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def gated_norm_native(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    group_size: int,
    eps: float,
    order: str,
    wide: bool,
) -> torch.Tensor:
    assert x.shape == gate.shape, (x.shape, gate.shape)
    assert x.dtype == gate.dtype, (x.dtype, gate.dtype)
    assert weight is None or (weight.is_contiguous() and weight.numel() in (group_size, x.shape[1]))
    out = torch.empty(x.shape, dtype=x.dtype)
    _KERNELS.library.rayk_gated_norm(
        x.data_ptr(),
        x.stride(0),
        gate.data_ptr(),
        gate.stride(0),
        None if weight is None else weight.data_ptr(),
        0 if weight is None or weight.numel() == group_size else group_size,
        out.data_ptr(),
        len(x),
        x.shape[1] // group_size,
        group_size,
        eps,
        ORDERS[order],
        wide,
        _TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def rotate_native(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairing: str = "halves",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate into a new tensor or into `out` [T, H, D], dense rows; it may be x itself if halves turn."""
    num_tokens, num_heads, size = x.shape
    half = cos.shape[-1]
    wide = cos.dtype == torch.float32
    assert cos.shape == sin.shape == (num_tokens, 1, half), (cos.shape, sin.shape, x.shape)
    assert cos.dtype == sin.dtype, (cos.dtype, sin.dtype)
    assert cos.dtype == x.dtype or (wide and pairing == "pairs"), (cos.dtype, x.dtype, pairing)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert 2 * half <= size, (half, size)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    assert out.shape == x.shape, (out.shape, x.shape)
    assert out.dtype == x.dtype, (out.dtype, x.dtype)
    assert out.stride(2) == 1, "dense rows"
    _KERNELS.library.rayk_rotate(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        num_tokens,
        num_heads,
        size,
        half,
        PAIRINGS[pairing],
        wide,
        _TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def gated_native(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * size, gate_up.shape
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype)
    _KERNELS.library.rayk_gate(
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        num_tokens,
        size,
        ACTIVATIONS[activation],
        _TYPES[gate_up.dtype],
        torch.get_num_threads(),
    )
    return out


def add_native(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert x.shape == y.shape, (x.shape, y.shape)
    assert x.dtype == y.dtype, (x.dtype, y.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    _KERNELS.library.rayk_add(
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        y.stride(0),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        _TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return out
