"""One of a layer's caches as its kernels see it: which rows are live, where they lie, what is digested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.digest import DigestedView
from rayk.kv.caches import TORCH_DTYPES, FieldView
from rayk.kv.fields import FIELD_IDS, PageField
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import KVCacheSpec, rows_per_block
from rayk.parallel.shard import WHOLE, TokenShard

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LayerView:
    """One of a layer's caches as its kernels see it. Filled by `make_layer_view`."""

    layer: int
    group: KVCacheGroup
    fields: tuple[FieldView, ...]
    """The spec's `fields()`, each [kernel blocks, local units, rows of a kernel block, elements]."""
    tokens: TokenShard = WHOLE
    """Whose rows these are, by what the engine's slots are computed with, never by a page map: a proof by the
    map's own word would agree with any map."""

    @cached_property
    def seen(self) -> KVCacheSpec:
        """What tells the live rows."""
        return self.group.seen_by(self.layer)

    @cached_property
    def kernel_block_size(self) -> int:
        """Rows of a kernel block."""
        return int(self.fields[0].view.shape[2])

    @cached_property
    def num_blocks(self) -> int:
        """Kernel blocks."""
        return int(self.fields[0].view.shape[0])

    @cached_property
    def block_rows(self) -> int:
        """Rows of a manager's block on this rank."""
        spec = self.group.spec
        return self.tokens.count(spec.block_size) if spec.has_token_rows else rows_per_block(spec)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all fields and local units."""
        return sum(len(f.units) * f.view.shape[3] * f.view.element_size() for f in self.fields)

    @cached_property
    def packed(self) -> tuple[DigestedView, ...]:
        """Fields that lie side by side in each (unit, row) are one view: K and V of attention."""
        packed: list[DigestedView] = []
        for field in self.fields:
            alone = DigestedView(
                field.view, self.layer, field.units, ((FIELD_IDS[field.name], 0, int(field.view.shape[3])),)
            )
            joined = _join(packed[-1], alone) if packed else None
            packed[-1:] = [*packed[-1:], alone] if joined is None else [joined]
        return tuple(packed)

    def live_rows(self, num_tokens: int) -> range:
        """Return the positions of the live rows of a sequence."""
        return self.seen.live_rows(num_tokens)

    def held_rows(self, num_tokens: int, first_row: int = 0) -> Ints:
        """Return the positions of the live rows of a sequence from `first_row` on that lie on this rank."""
        live = self.live_rows(num_tokens)
        positions = np.arange(max(live.start, first_row), live.stop, dtype=np.int64)
        return positions if self.tokens == WHOLE else positions[self.tokens.holds(positions)]

    def places(
        self, block_table: Sequence[int], num_tokens: int, first_row: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (kernel block ids, rows in them, token positions) of the live rows from `first_row` on, each
        int64 [rows] on the view's device; see `host_places`."""
        device = self.fields[0].view.device
        block_ids, rows, positions = map(
            torch.from_numpy, self.host_places(block_table, num_tokens, first_row)
        )
        return block_ids.to(device), rows.to(device), positions.to(device)

    def host_places(
        self, block_table: Sequence[int], num_tokens: int, first_row: int = 0
    ) -> tuple[Ints, Ints, Ints]:
        """Find the same in the host's memory. `block_table`: manager's ids. AssertionError where it names
        blocks that are none of the rank's."""
        return self.places_of(block_table, self.held_rows(num_tokens, first_row))

    def places_of(self, block_table: Sequence[int], positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Find any positions of tokens that lie on this rank, int64 [rows], as `host_places` finds live
        ones."""
        spec, per_kernel_block, per_block = self.group.spec, self.kernel_block_size, self.block_rows
        block, row = np.divmod(positions, spec.block_size)
        ids = np.asarray(block_table, dtype=np.int64)[block]
        # Most caches have a row per token, and blocks that are their kernels'.
        if not spec.has_token_rows:
            row //= spec.block_size // per_block
        elif self.tokens != WHOLE:
            row = self.tokens.local(row)
        if per_block != per_kernel_block:
            kernel_block, row = np.divmod(row, per_kernel_block)
            ids = ids * (per_block // per_kernel_block) + kernel_block
        # What is negative is large without its sign.
        assert not len(ids) or ids.view(np.uint64).max() < self.num_blocks, (
            f"block ids outside 0 .. {self.num_blocks - 1}: {block_table}"
        )
        return ids, row, positions


def make_layer_view(
    layer: int, group: KVCacheGroup, fields: Sequence[FieldView], tokens: TokenShard = WHOLE
) -> LayerView:
    """Describe one of a layer's bound caches; pass the views its kernels use, in any order, and the tokens
    whose rows they write (of a state, which no side divides, they do not count).

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
    if not group.spec.has_token_rows:
        return LayerView(layer, group, ordered)
    assert group.spec.block_size % tokens.period == 0, f"{where}: blocks do not hold whole turns of {tokens}"
    return LayerView(layer, group, ordered, tokens)


def _join(left: DigestedView, right: DigestedView) -> DigestedView | None:
    """Return both as one, if the right one's field lies just behind the left one's in each (unit, row) of the
    same memory."""
    view, more = left.kv_cache, right.kv_cache
    is_same = (
        left.units == right.units
        and view.dtype == more.dtype
        and view.shape[:3] == more.shape[:3]
        and view.stride() == more.stride()
        and view.untyped_storage().data_ptr() == more.untyped_storage().data_ptr()
        and view.storage_offset() + view.shape[3] == more.storage_offset()
    )
    if not is_same:
        return None
    ((field_id, _, num_elems),) = right.fields
    start = int(view.shape[3])
    wide = view.as_strided((*view.shape[:3], start + num_elems), view.stride(), view.storage_offset())
    return DigestedView(wide, left.layer, left.units, (*left.fields, (field_id, start, num_elems)))


def _check_view(where: str, page_field: PageField, found: FieldView) -> None:
    view = found.view
    dtype = TORCH_DTYPES[page_field.dtype]
    assert view.dtype == dtype, f"{where}: seen as {view.dtype}, the page holds {page_field.dtype}"
    assert view.shape[1] == len(found.units), f"{where}: {view.shape[1]} units, ids of {len(found.units)}"
    row_bytes = view.shape[3] * view.element_size()
    assert row_bytes == page_field.row_bytes, f"{where}: rows of {row_bytes} bytes, {page_field.row_bytes}"
