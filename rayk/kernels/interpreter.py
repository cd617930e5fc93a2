"""Whether Triton runs in its CPU interpreter, and what that requires.

The interpreter computes in numpy, which has no bfloat16: bf16 arithmetic gives garbage and narrowing to bf16
truncates. Kernels therefore take a flag to widen what they load, and launchers pass float32 outputs. Its
launches patch Triton's language module and are not thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, TypeVar

import torch
import triton

_Tensor = TypeVar("_Tensor", torch.Tensor, torch.Tensor | None)

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Fixed when Triton is first imported (TRITON_INTERPRET=1 in the environment)."""

_LOCK = threading.Lock()


def launching() -> contextlib.AbstractContextManager[object]:
    """Return a context to hold around a kernel launch."""
    return _LOCK if INTERPRETED else contextlib.nullcontext()


def widened(tensor: _Tensor) -> _Tensor:
    """Return a bf16 tensor as float32 if the interpreter is to compute with it."""
    if INTERPRETED and tensor is not None and tensor.dtype == torch.bfloat16:
        return tensor.float()
    return tensor


def index_of(tensor: Any) -> int:
    """Return the value of an interpreted scalar, which NumPy keeps as an array of one element."""
    return int(tensor.handle.data.item())


def _mend_index() -> None:
    """Have loops over interpreted bounds work: Triton 3.6 calls int on the array, which NumPy 2.4 refuses."""
    from triton.runtime.interpreter import _LangPatchScope

    set_attr = _LangPatchScope.set_attr

    def mended(scope: Any, owner: object, name: str, value: object) -> None:
        set_attr(scope, owner, name, index_of if name == "__index__" else value)

    _LangPatchScope.set_attr = mended


if INTERPRETED and triton.__version__.startswith("3.6."):
    _mend_index()
