"""copy_runs in C++ (native.cpp): one memcpy per run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from rayk.kernels.copy_runs.table import RunTable
from rayk.kernels.native import NativeKernels

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG)


_KERNELS = NativeKernels(Path(__file__).with_name("native.cpp"), {"rayk_copy_runs": _ARGUMENTS})


def native_copy_runs() -> Callable[..., None] | None:
    """Build the C++ function; return it, or None if it cannot be built."""
    return _KERNELS.library.rayk_copy_runs if _KERNELS.why_not() is None else None


def copy_runs_native(
    source: torch.Tensor, destination: torch.Tensor, runs: RunTable, blocks: torch.Tensor
) -> None:
    """`blocks` is int64 [2, n]: source's, destination's."""
    function = native_copy_runs()
    assert function is not None, "no native copy_runs"
    assert not source.is_cuda, "memcpy sees the host's memory"
    function(
        source.data_ptr(),
        destination.data_ptr(),
        runs.rows.data_ptr(),
        runs.num_runs,
        blocks[0].data_ptr(),
        blocks[1].data_ptr(),
        blocks.shape[1],
    )
