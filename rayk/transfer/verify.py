"""Proof that D's KV is P's: digests through the views that kernels write and read, never through a map.

A digest is one 64-bit word per (layer, field, global unit, row group); see kernels.digest. All words of a
request lie in one vector, whose order comes from the specs and the live rows alone: ranks with other
shards, layouts or block sizes hold the same words for the same KV at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.digest import digest_rows
from rayk.kv.caches import TORCH_DTYPES, FieldView
from rayk.kv.fields import FIELD_IDS, PageField
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import rows_per_block
from rayk.types.errors import KVMismatch

Digests = npt.NDArray[np.int64]
"""[words] of one rank: view by view, field by field, [global unit, live row group]."""
Rows = dict[tuple[str, int], npt.NDArray[np.uint8]]
"""(field, global unit) -> uint8 [rows, row_bytes], rows in order of token position."""
Sources = Mapping[tuple[int, str, int], int]
"""(group, field, unit) -> the producer rank it is read from."""


@dataclass(frozen=True, eq=False)
class _Packed:
    """Fields that lie side by side in the content of each (unit, row): digested in one pass."""

    view: torch.Tensor
    """[kernel blocks, local units, rows of a kernel block, elements of all]."""
    units: tuple[int, ...]
    field_indices: tuple[int, ...]
    starts: tuple[int, ...]
    """First element of each field, and the end of the last."""


@dataclass(frozen=True, eq=False)
class LayerView:
    """One of a layer's caches as its kernels see it. Filled by `make_layer_view`."""

    layer: int
    group: KVCacheGroup
    fields: tuple[FieldView, ...]
    """As in the spec's `fields()`; each [kernel blocks, local units, rows of a kernel block, elements]."""

    @property
    def kernel_block_size(self) -> int:
        """Rows of a kernel block."""
        return int(self.fields[0].view.shape[2])

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields."""
        return tuple(f.name for f in self.fields)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all fields and local units."""
        return sum(len(f.units) * f.view.shape[3] * f.view.element_size() for f in self.fields)

    @cached_property
    def packed(self) -> tuple[_Packed, ...]:
        """All fields, those of one view together: K and V of attention."""
        packed: list[_Packed] = []
        for index, field in enumerate(self.fields):
            if packed and (joined := _join(packed[-1], index, field)) is not None:
                packed[-1] = joined
            else:
                packed.append(_Packed(field.view, field.units, (index,), (0, int(field.view.shape[3]))))
        return tuple(packed)

    def live_rows(self, num_tokens: int) -> range:
        """Positions of the live rows of a sequence."""
        return self.group.seen_by(self.layer).live_rows(num_tokens)

    def places(
        self, block_table: Sequence[int], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(kernel block ids, rows in them, token positions) of the live rows, each int64 [rows] on the
        view's device. `block_table`: manager's ids. AssertionError, without waiting for the device, where it
        names blocks that are none of the rank's."""
        spec, live = self.group.spec, self.live_rows(num_tokens)
        rows = rows_per_block(spec)
        positions = np.arange(live.start, live.stop, dtype=np.int64)
        block, token = np.divmod(positions, spec.block_size)
        row = token // (spec.block_size // rows)
        kernel_block, kernel_row = np.divmod(row, self.kernel_block_size)
        table = np.asarray(block_table, dtype=np.int64)
        ids = table[block] * (rows // self.kernel_block_size) + kernel_block
        num_blocks = self.fields[0].view.shape[0]
        assert np.all((ids >= 0) & (ids < num_blocks)), f"block ids outside 0 .. {num_blocks - 1}: {table}"
        device = self.fields[0].view.device
        return tuple(torch.from_numpy(a).to(device) for a in (ids, kernel_row, positions))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, order=True)
class WrongWord:
    """One digest word that differs, ordered by canonical coordinate."""

    group: int
    layer: int
    field_index: int
    unit: int
    row_group: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Where the words of one field of one view lie in the digest vector, and what they cover."""

    view: LayerView
    field_index: int
    start: int
    num_units: int
    """Global ones."""
    row_groups: range

    @property
    def field(self) -> FieldView:
        """The view that is digested."""
        return self.view.fields[self.field_index]

    @property
    def stop(self) -> int:
        """First word after these."""
        return self.start + self.num_units * len(self.row_groups)

    def words(self, digests: Digests) -> Digests:
        """[..., global unit, row group] of [..., words]: a view."""
        shape = (*digests.shape[:-1], self.num_units, len(self.row_groups))
        return digests[..., self.start : self.stop].reshape(shape)


def make_layer_view(layer: int, group: KVCacheGroup, fields: Sequence[FieldView]) -> LayerView:
    """Describe one of a layer's bound caches; pass the views its kernels use, in any order.

    AssertionError, naming layer and field, where a view cannot be what the spec says lies in the page.
    """
    by_name = {f.name: f for f in fields}
    wanted = group.spec.fields()
    where = f"layer {layer} {group.spec.part}"
    assert sorted(by_name) == sorted(f.name for f in wanted), f"{where}: fields {sorted(by_name)}"
    ordered = tuple(by_name[f.name] for f in wanted)
    for page_field, found in zip(wanted, ordered, strict=True):
        _check_view(f"{where}, {found.name}", page_field, found)
    assert len({(f.view.shape[0], f.view.shape[2]) for f in ordered}) == 1, f"{where}: unlike blocks"
    return LayerView(layer, group, ordered)


def _join(packed: _Packed, index: int, field: FieldView) -> _Packed | None:
    """With one field more, if it lies just behind in each (unit, row) of the same memory."""
    view, more = packed.view, field.view
    is_same = (
        packed.units == field.units
        and view.dtype == more.dtype
        and view.shape[:3] == more.shape[:3]
        and view.stride() == more.stride()
        and view.untyped_storage().data_ptr() == more.untyped_storage().data_ptr()
        and view.storage_offset() + view.shape[3] == more.storage_offset()
    )
    if not is_same:
        return None
    stop = packed.starts[-1] + int(more.shape[3])
    wide = view.as_strided((*view.shape[:3], stop), view.stride(), view.storage_offset())
    return _Packed(wide, packed.units, (*packed.field_indices, index), (*packed.starts, stop))


def _check_view(where: str, page_field: PageField, found: FieldView) -> None:
    view = found.view
    dtype = TORCH_DTYPES[page_field.dtype]
    assert view.dtype == dtype, f"{where}: seen as {view.dtype}, the page holds {page_field.dtype}"
    assert view.shape[1] == len(found.units), f"{where}: {view.shape[1]} units, ids of {len(found.units)}"
    row_bytes = view.shape[3] * view.element_size()
    assert row_bytes == page_field.row_bytes, f"{where}: rows of {row_bytes} bytes, {page_field.row_bytes}"


def sorted_views(views: Sequence[LayerView]) -> tuple[LayerView, ...]:
    """In canonical order, which both sides share, however they group layers, and digests are laid out in."""
    return tuple(sorted(views, key=lambda v: (v.layer, v.group.spec.part)))


def compute_digests(
    views: Sequence[LayerView],
    block_tables: Sequence[Sequence[int]],
    num_tokens: int,
    rows_per_group: int,
) -> Digests:
    """Digests of a sequence's live rows, [words]; `views` in canonical order.

    Zero where this rank holds no such unit. `block_tables` per group, manager's ids.
    """
    parts = list(_parts(views, num_tokens, rows_per_group))
    part_of = {(part.view, part.field_index): part for part in parts}
    places: dict[tuple[int | range, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    words: list[torch.Tensor] = []
    digested: list[_Part] = []
    for view, packed in ((v, packed) for v in views for packed in v.packed):
        live = view.live_rows(num_tokens)
        key = (view.group.index, live, view.kernel_block_size, packed.view.shape[0])
        if key not in places:
            places[key] = view.places(block_tables[view.group.index], num_tokens)
        found_in = [part_of[view, index] for index in packed.field_indices]
        word = digest_rows(
            packed.view,
            *places[key],
            layer=view.layer,
            units=packed.units,
            fields=[
                (FIELD_IDS[part.field.name], start, stop - start)
                for part, (start, stop) in zip(found_in, pairwise(packed.starts), strict=True)
            ],
            rows_per_group=rows_per_group,
            first_group=found_in[0].row_groups.start,
            num_groups=len(found_in[0].row_groups),
            are_places_checked=True,
        )
        words.append(word.reshape(-1))
        digested += found_in
    # The only wait for the device.
    copied = torch.cat(words).cpu().numpy()
    found = np.zeros(parts[-1].stop, dtype=np.int64)
    stop = 0
    for part in digested:
        start, stop = stop, stop + len(part.field.units) * len(part.row_groups)
        part.words(found)[list(part.field.units)] = copied[start:stop].reshape(len(part.field.units), -1)
    return found


def compare_digests(
    views: Sequence[LayerView],
    expected: Digests,
    found: Digests,
    sources: Sources,
    num_tokens: int,
    rows_per_group: int,
) -> list[WrongWord]:
    """Words that differ, in canonical order.

    `expected`: [producer rank, words]. Of each unit only the rank in `sources` counts: replicas may differ
    in the last bit, since ranks compute them apart.
    """
    wrong: list[WrongWord] = []
    for part in _parts(views, num_tokens, rows_per_group):
        view, field = part.view, part.field
        units = list(field.units)
        ranks = [sources[view.group.index, field.name, unit] for unit in units]
        theirs = part.words(expected)[ranks, units]
        ours = part.words(found)[units]
        for u, g in np.argwhere(theirs != ours).tolist():
            row_group = part.row_groups[g]
            wrong.append(WrongWord(view.group.index, view.layer, part.field_index, units[u], row_group))
    return sorted(wrong)


def digest_mismatch(
    request_id: str,
    views: Sequence[LayerView],
    wrong: Sequence[WrongWord],
    num_tokens: int,
    rows_per_group: int,
) -> KVMismatch:
    """What the digests alone can say about the first wrong word: the row group, not yet the token."""
    first = wrong[0]
    view = next(v for v in views if (v.group.index, v.layer) == (first.group, first.layer))
    live = view.live_rows(num_tokens)
    start = max(live.start, first.row_group * rows_per_group)
    stop = min(live.stop, (first.row_group + 1) * rows_per_group)
    tokens = f"among tokens {start} to {stop - 1}" if stop - start > 1 else f"at token {start}"
    return KVMismatch(
        request_id,
        first.layer,
        first.group,
        view.fields[first.field_index].name,
        first.unit,
        start,
        f"digests differ for {len(wrong)} of the rank's words; first {tokens}",
        num_bytes_checked(views, num_tokens),
        unit_name=view.group.spec.fields()[first.field_index].unit_name,
    )


def num_bytes_checked(views: Sequence[LayerView], num_tokens: int) -> int:
    """Bytes of a sequence's live rows on this rank: what its digests cover."""
    return sum(len(v.live_rows(num_tokens)) * v.row_bytes for v in views)


def fetch_rows(view: LayerView, block_table: Sequence[int], num_tokens: int) -> Rows:
    """The live rows of one cache of a layer as raw bytes, read through its bound views."""
    block_ids, in_block, _ = view.places(block_table, num_tokens)
    rows: Rows = {}
    for field in view.fields:
        values = field.view[block_ids, :, in_block].contiguous().cpu()  # [rows, units, elements]
        content = values.view(torch.uint8).numpy()
        rows.update(((field.name, unit), content[:, u]) for u, unit in enumerate(field.units))
    return rows


def _parts(views: Sequence[LayerView], num_tokens: int, rows_per_group: int) -> Iterator[_Part]:
    """The digest vector's parts, from first to last word."""
    start = 0
    for view in views:
        live = view.live_rows(num_tokens)
        row_groups = range(live.start // rows_per_group, -(-live.stop // rows_per_group))
        for index, page_field in enumerate(view.group.spec.fields()):
            part = _Part(view, index, start, page_field.units, row_groups)
            start = part.stop
            yield part
