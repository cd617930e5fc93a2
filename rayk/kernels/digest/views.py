"""The input of a digest: views of a rank's cache, and where a request's live rows lie in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.digest.lanes import LaneTable, make_lane_tables
from rayk.kernels.digest.reference import coordinate_keys, not_finite_bits, word_bytes

Ints = npt.NDArray[np.int64]
NUM_LOCATED = 4
"""Numbers of row groups for which it is remembered where words lie: some MB each for the longest requests."""


@dataclass(frozen=True, eq=False)
class DigestedView:
    """Fields that lie side by side in the rows of one layer's cache."""

    kv_cache: torch.Tensor
    """[B, H, N, C], C dense."""
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
    """Rows of a request: row i, at (block_ids[i], slots[i]), is absolute token position rows[i].

    Each is int64 [n_rows], dense, in the host's memory, whatever device the views are on: all of a request go
    there in one copy. Row groups are counted from `first_group`.
    """

    block_ids: Ints
    slots: Ints
    rows: Ints
    first_group: int
    num_groups: int

    def __post_init__(self) -> None:
        each = self.block_ids, self.slots, self.rows
        assert all(a.dtype == np.int64 and a.shape == each[0].shape and a.flags.c_contiguous for a in each)


@dataclass(frozen=True, eq=False)
class DigestedViews:
    """Keep it while the views are bound: its tables are made once."""

    views: tuple[DigestedView, ...]
    place_of: tuple[int, ...]
    """Index of the `RowPlaces` that locates the rows of each view."""

    @cached_property
    def addresses(self) -> AddressTable:
        """Where everything lies, for views in this process's memory or on its device."""
        return _make_address_table(self.views, self.place_of)

    @cached_property
    def lane_tables(self) -> tuple[LaneTable, ...]:
        """What the GPU's kernel is launched with."""
        table = self.addresses
        return make_lane_tables(table.bundles, table.entries, self.views[0].kv_cache.device)


@dataclass(frozen=True, eq=False)
class AddressTable:
    """Views as addresses, in native.cpp's form: bundles of rows read together, and what to take of a row."""

    bundles: Ints
    """[bundles, 6]: address of row 0 of block 0, bytes per block and per row, first entry and one past its
    last, index of its places. Sorted by places, then address."""
    entries: Ints
    """[entries, 5], one per (field, unit): first byte in a bundle's row, bytes, key, and the two
    `not_finite_bits`."""
    entry_view: Ints
    entry_lane: Ints
    """[entries]: index of the view, and of (field, unit) in it, units within fields."""
    view_place: Ints
    view_lanes: Ints
    """[views]: index of its places; number of (field, unit) pairs, each one word per row group."""
    most_words: int
    """Most words of any entry."""

    @cached_property
    def first_words(self) -> Callable[[tuple[int, ...]], tuple[Ints, int]]:
        """Row groups of a request in each of its places -> where the words of each entry begin in its
        digests, and how many words there are."""

        def find(num_groups: tuple[int, ...]) -> tuple[Ints, int]:
            of_view = np.array(num_groups, dtype=np.int64)[self.view_place]
            stops = np.cumsum(self.view_lanes * of_view)
            starts = stops - self.view_lanes * of_view
            return starts[self.entry_view] + self.entry_lane * of_view[self.entry_view], int(stops[-1])

        return lru_cache(maxsize=NUM_LOCATED)(find)


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
    """Compute a view's `AddressTable.entries` as [units, fields, 5], offsets within the unit's own row."""
    itemsize = view.kv_cache.element_size()
    made = np.empty((len(view.units), len(view.fields), 5), dtype=np.int64)
    for f, (field_id, start, num_elems) in enumerate(view.fields):
        made[:, f, 0], made[:, f, 1] = start * itemsize, num_elems * itemsize
        made[:, f, 2] = coordinate_keys(view.layer, field_id, view.units).numpy()
        made[:, f, 3:] = not_finite_bits(view.kv_cache.dtype, word_bytes(num_elems * itemsize))
    return made


def _byte_strides(view: DigestedView) -> list[int]:
    """Compute the strides of blocks, units and rows in bytes; of an axis of one it may be anything, and is
    0."""
    cache = view.kv_cache
    steps = zip(cache.stride()[:3], cache.shape[:3], strict=True)
    return [stride * cache.element_size() if size > 1 else 0 for stride, size in steps]
