"""The digest in C++ (native.cpp): one call reads all views of a rank in place, at memory speed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rayk.kernels.digest.views import DigestedViews, Ints, RowPlaces
from rayk.kernels.native import NativeKernels

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER)


_KERNELS = NativeKernels(Path(__file__).with_name("native.cpp"), {"rayk_digest": _ARGUMENTS})


def native_digest() -> Callable[..., None] | None:
    """Build the C++ function; return it, or None if it cannot be built."""
    return _KERNELS.library.rayk_digest if _KERNELS.why_not() is None else None


def digest_views_native(digested: DigestedViews, places: Sequence[RowPlaces], rows_per_group: int) -> Ints:
    """Compute int64 [words + 1], see `digest_views`."""
    function = native_digest()
    assert function is not None, "no native digest"
    table = digested.addresses
    outs, num_words = table.first_words(tuple(p.num_groups for p in places))
    out = np.zeros(num_words + 1, dtype=np.int64)
    at = [
        (p.block_ids.ctypes.data, p.slots.ctypes.data, p.rows.ctypes.data, len(p.rows), p.first_group)
        for p in places
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
        out.ctypes.data,
        out.ctypes.data + num_words * out.itemsize,
    )
    return out
