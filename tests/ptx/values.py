"""Values of registers: what their bits mean, and what is computed of them element by element."""

# Shapes: N threads.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "neg": lambda x: -x,
}


def to_bf16(x: Array) -> Array:
    """Round float32 to bfloat16's bits."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(torch.bfloat16).view(torch.int16).numpy()


def elements(raw: Array, kind: str) -> Array:
    """View bytes [..., B] as float64 elements of a product's operand."""
    raw = np.ascontiguousarray(raw)
    if kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind in ("e4m3", "e5m2"):
        fp8 = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        return torch.from_numpy(raw).view(fp8).double().numpy()
    if kind in ("s8", "u8"):
        return raw.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    return raw.view(np.float16).astype(np.float64)


def parameter(kind: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return np.uint64(value.data_ptr())
    if kind.startswith("f"):
        return np.array(value, numpy_type(kind)).view(RAW[int(kind[1:]) // 8])[()]
    bits = int(kind[1:])
    return RAW[bits // 8](int(value) % (1 << bits))


def numpy_type(kind: str) -> Any:
    return np.dtype(f"{KINDS[kind[0]]}{int(kind[1:]) // 8}")


def typed(raw: Array, kind: str) -> Array:
    if kind == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(numpy_type(kind))


def untyped(value: Array, kind: str) -> Array:
    if kind == "bf16":
        return to_bf16(value).view(np.uint16)
    wanted = numpy_type(kind)
    return np.ascontiguousarray(value.astype(wanted)).view(RAW[wanted.itemsize])


def split(raw: Array, parts: int) -> list[Array]:
    size = raw.dtype.itemsize // parts
    pieces = raw.view(RAW[size]).reshape(-1, parts)
    return [np.ascontiguousarray(pieces[:, i]) for i in range(parts)]


def quotient(a: Array, b: Array) -> Array:
    """Divide integers, rounding towards zero; what is divided by zero is all ones."""
    whole = np.array([(-1 if y == 0 else abs(int(x)) // abs(int(y))) for x, y in zip(a, b, strict=True)])
    signs = np.where((a < 0) != (b < 0), -1, 1)
    return (whole * signs).astype(a.dtype)
