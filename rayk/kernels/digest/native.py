"""The digest in C++ (native.cpp): one call reads all views of a rank in place, at memory speed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from rayk.kernels.digest.views import DigestedViews, RowPlaces
from rayk.kernels.native import NativeKernels

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER)


_KERNELS = NativeKernels(Path(__file__).with_name("native.cpp"), {"rayk_digest": _ARGUMENTS})


def native_digest() -> Callable[..., None] | None:
    """Build the C++ function; return it, or None if it cannot be built."""
    return _KERNELS.library.rayk_digest if _KERNELS.why_not() is None else None


def digest_views_native(
    digested: DigestedViews, places: Sequence[RowPlaces], rows_per_group: int
) -> torch.Tensor:
    function = native_digest()
    assert function is not None, "no native digest"
    table = digested.addresses
    outs, num_words = table.first_words(np.array([p.num_groups for p in places], dtype=np.int64))
    out = torch.zeros(num_words + 1, dtype=torch.int64)
    # Held by name: the table keeps addresses only.
    contiguous = [tuple(t.contiguous() for t in (p.block_ids, p.slots, p.rows)) for p in places]
    at = [
        [*(t.data_ptr() for t in tensors), len(tensors[0]), p.first_group]
        for tensors, p in zip(contiguous, places, strict=True)
    ]
    place_table = np.array(at, dtype=np.int64)
    function(
        place_table.ctypes.data,
        table.bundles.ctypes.data,
        len(table.bundles),
        table.entries.ctypes.data,
        outs.ctypes.data,
        rows_per_group,
        table.most_words,
        out.data_ptr(),
        out[-1:].data_ptr(),
    )
    return out
