"""What is digested together: views of a rank's cache, and where the live rows of a request lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.digest.reference import coordinate_keys, not_finite_bits, word_bytes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DigestedView:
    """Fields that lie side by side in the rows of one layer's cache."""

    kv_cache: torch.Tensor
    """[B, H, N, C], the content axis dense."""
    layer: int
    units: tuple[int, ...]
    """Global id of each of the H local heads."""
    fields: tuple[tuple[int, int, int], ...]
    """(field id, start_elem, num_elems) of the content axis."""

    def __post_init__(self) -> None:
        content = self.kv_cache.shape[3]
        assert self.kv_cache.stride(-1) == 1, "the content axis must be dense"
        assert len(self.units) == self.kv_cache.shape[1], "one global unit id per local head"
        assert all(0 <= start <= start + num_elems <= content for _, start, num_elems in self.fields)


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Rows of a request: row i (block_ids[i], slots[i]) holds absolute token position rows[i].

    Each int64 [n_rows] on the views' device. Row groups are counted from `first_group`; sums of positions
    that nobody gave are 0.
    """

    block_ids: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    first_group: int
    num_groups: int

    def __post_init__(self) -> None:
        assert len(self.block_ids) == len(self.slots) == len(self.rows)
        assert self.block_ids.dtype == self.slots.dtype == self.rows.dtype == torch.int64


@dataclass(frozen=True, eq=False)
class DigestedViews:
    """All views of a rank. Keep it as long as they are bound: what native code needs to know is made once."""

    views: tuple[DigestedView, ...]
    place_of: tuple[int, ...]
    """Of each view: which of a request's `RowPlaces` say where its rows are."""

    @cached_property
    def addresses(self) -> AddressTable:
        """Where everything lies; of views in this process's memory."""
        return _make_address_table(self.views, self.place_of)


@dataclass(frozen=True, eq=False)
class AddressTable:
    """Views as native.cpp takes them: bundles of rows that are read together, and what to take of a row."""

    bundles: Ints
    """[bundles, 6]: address of row 0 of block 0, bytes from block to block and from row to row, first entry
    and the one after its last, index of its places. In order of places, then addresses."""
    entries: Ints
    """[entries, 5], one for each field of a unit: first byte in a bundle's row, bytes, key, and the two
    `not_finite_bits` of its words."""
    entry_view: Ints
    entry_lane: Ints
    """[entries]: index of the view, and of (field, unit) in it, units within fields."""
    view_place: Ints
    view_lanes: Ints
    """[views]: index of its places; (field, unit) pairs, each of which has one word a row group."""
    most_words: int
    """Of any entry."""


def _make_address_table(views: Sequence[DigestedView], place_of: Sequence[int]) -> AddressTable:
    bundles, entries, lanes = [], [], []
    num_entries = 0
    for view, place in zip(views, place_of, strict=True):
        of_unit = _entries_of(view)
        num_units, num_fields, _ = of_unit.shape
        stride_b, stride_h, stride_n = _byte_strides(view)
        step = np.arange(num_units) * stride_h
        each = num_fields
        # Where neighbouring units lie closer than neighbouring rows, or blocks have one row, all units of a
        # row are read before the next row; else all rows of a unit.
        if view.kv_cache.shape[2] == 1 or stride_h < stride_n:
            of_unit[:, :, 0] += step[:, None]
            step, each = np.zeros(1, dtype=np.int64), num_units * num_fields
        first = num_entries + np.arange(len(step)) * each
        columns = (view.kv_cache.data_ptr() + step, stride_b, stride_n, first, first + each, place)
        bundles.append(np.stack(np.broadcast_arrays(*columns), axis=1))
        entries.append(of_unit.reshape(-1, 5))
        lanes.append(np.arange(num_units * num_fields).reshape(num_fields, num_units).T.reshape(-1))
        num_entries += num_units * num_fields
    all_bundles = np.concatenate(bundles).astype(np.int64)
    counts = [len(e) for e in entries]
    sizes = [num_elems * v.kv_cache.element_size() for v in views for _, _, num_elems in v.fields]
    return AddressTable(
        np.ascontiguousarray(all_bundles[np.lexsort((all_bundles[:, 0], all_bundles[:, 5]))]),
        np.concatenate(entries),
        np.repeat(np.arange(len(views)), counts),
        np.concatenate(lanes),
        np.array(place_of, dtype=np.int64),
        np.array(counts, dtype=np.int64),
        max((size // word_bytes(size) for size in sizes), default=0),
    )


def _entries_of(view: DigestedView) -> Ints:
    """[units, fields, 5] of `AddressTable.entries`, each as in a row of its own unit."""
    itemsize = view.kv_cache.element_size()
    made = np.empty((len(view.units), len(view.fields), 5), dtype=np.int64)
    for f, (field_id, start, num_elems) in enumerate(view.fields):
        made[:, f, 0], made[:, f, 1] = start * itemsize, num_elems * itemsize
        made[:, f, 2] = coordinate_keys(view.layer, field_id, view.units).numpy()
        made[:, f, 3:] = not_finite_bits(view.kv_cache.dtype, word_bytes(num_elems * itemsize))
    return made


def _byte_strides(view: DigestedView) -> list[int]:
    """From block to block, unit to unit, row to row."""
    return [stride * view.kv_cache.element_size() for stride in view.kv_cache.stride()[:3]]
