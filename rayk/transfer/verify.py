"""Proof that D's KV is P's: digests through the views that kernels write and read, never through a map.

A digest table holds one 64-bit word per (layer, field, global unit, row group); see kernels.digest. Tables
of ranks with other shards, layouts or block sizes hold the same words for the same KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.digest import digest_rows
from rayk.kv.fields import ITEMSIZE
from rayk.kv.groups import KVCacheGroup
from rayk.types.errors import KVMismatch

Digests = npt.NDArray[np.int64]
Rows = dict[tuple[str, int], npt.NDArray[np.uint8]]
"""(field, global unit) -> uint8 [rows, row_bytes], rows in order of token position."""


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer's KV as its kernels see it, and the meaning of its axes."""

    layer: int
    group: KVCacheGroup
    view: torch.Tensor
    """[B, H, N, C]: kernel blocks, local heads, token slots, content elements."""
    head_ids: tuple[int, ...]
    """Global KV head of each local one, as recorded when the weights were cut."""
    fields: tuple[tuple[str, int, int], ...]
    """(name, first element, number of elements) in the content axis."""

    @property
    def kernel_block_size(self) -> int:
        """Token slots of a kernel block."""
        return int(self.view.shape[2])

    @property
    def kernel_blocks_per_block(self) -> int:
        """Kernel blocks in a manager's block."""
        return self.group.spec.block_size // self.kernel_block_size


@dataclass(frozen=True, slots=True, order=True)
class WrongWord:
    """One digest word that differs, ordered by canonical coordinate."""

    group: int
    layer: int
    field_index: int
    unit: int
    row_group: int


def make_layer_view(
    layer: int, group: KVCacheGroup, view: torch.Tensor, head_ids: Sequence[int]
) -> LayerView:
    """Describe a layer's bound view [B, H, N, C]; pass the tensor its kernels use."""
    assert view.shape[1] == len(head_ids), "one global head id per local head"
    fields, start = [], 0
    for f in group.spec.fields():
        size = f.row_bytes // ITEMSIZE[f.dtype]
        fields.append((f.name, start, size))
        start += size
    assert start == view.shape[3], "the view holds every field"
    return LayerView(layer, group, view, tuple(head_ids), tuple(fields))


def num_row_groups(num_tokens: int, rows_per_group: int) -> int:
    """Row groups of a sequence."""
    return -(-num_tokens // rows_per_group)


def compute_digests(
    views: Sequence[LayerView],
    block_tables: Sequence[Sequence[int]],
    num_tokens: int,
    rows_per_group: int,
) -> Digests:
    """Digests of a sequence's live rows: [layer (as in `views`), field, global unit, row group].

    Zero where this rank holds no such unit or no row is live. `block_tables` per group, manager's ids.
    """
    groups = num_row_groups(num_tokens, rows_per_group)
    num_fields = max(len(v.fields) for v in views)
    num_units = max(f.units for v in views for f in v.group.spec.fields())
    table = np.zeros((len(views), num_fields, num_units, groups), dtype=np.int64)
    places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    words = []
    for v in views:
        key = (v.group.index, v.kernel_block_size)
        if key not in places:
            places[key] = _places(v, block_tables[v.group.index], num_tokens)
        words.append(
            digest_rows(
                v.view,
                *places[key],
                layer=v.layer,
                units=v.head_ids,
                fields=[(i, start, size) for i, (_, start, size) in enumerate(v.fields)],
                rows_per_group=rows_per_group,
                first_group=0,
                num_groups=groups,
            )
        )
    for i, (v, word) in enumerate(zip(views, words, strict=True)):
        table[i, : len(v.fields), list(v.head_ids)] = word.cpu().numpy().swapaxes(0, 1)
    return table


def compare_digests(
    views: Sequence[LayerView], expected: Digests, found: Digests, sources: Mapping[tuple[int, int], int]
) -> list[WrongWord]:
    """Words that differ, in canonical order.

    `expected`: [producer rank, layer, field, unit, row group]; `sources`: (group, unit) -> the producer rank
    it was read from, whose word counts (replicas may differ in the last bit: ranks compute them apart).
    """
    wrong: list[WrongWord] = []
    for i, v in enumerate(views):
        ranks = [sources[v.group.index, unit] for unit in v.head_ids]
        theirs = expected[ranks, i, :, list(v.head_ids)]
        ours = found[i][:, list(v.head_ids)].swapaxes(0, 1)
        for h, f, g in np.argwhere(theirs != ours).tolist():
            wrong.append(WrongWord(v.group.index, v.layer, f, v.head_ids[h], g))
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
    view = next(v for v in views if v.layer == first.layer)
    live = view.group.spec.live_rows(num_tokens)
    start = max(live.start, first.row_group * rows_per_group)
    stop = min(live.stop, (first.row_group + 1) * rows_per_group)
    name = view.fields[first.field_index][0]
    what = f"digests differ for {len(wrong)} of the rank's words; first among tokens {start} to {stop - 1}"
    return KVMismatch(
        request_id,
        first.layer,
        first.group,
        name,
        first.unit,
        start,
        what,
        num_bytes_checked(views, num_tokens),
    )


def num_bytes_checked(views: Sequence[LayerView], num_tokens: int) -> int:
    """Bytes of a sequence's live rows on this rank: what its digests cover."""
    return sum(
        len(v.group.spec.live_rows(num_tokens)) * len(v.head_ids) * v.view.shape[3] * v.view.element_size()
        for v in views
    )


def fetch_rows(view: LayerView, block_table: Sequence[int], num_tokens: int) -> Rows:
    """The live rows of one layer as raw bytes, read through its bound view."""
    block_ids, slots, _ = _places(view, block_table, num_tokens)
    values = view.view[block_ids, :, slots]  # [rows, H, C]
    rows: Rows = {}
    for h, unit in enumerate(view.head_ids):
        for name, start, size in view.fields:
            field = values[:, h, start : start + size].contiguous().cpu()
            rows[name, unit] = field.view(torch.uint8).numpy()
    return rows


def _places(
    view: LayerView, block_table: Sequence[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(kernel block ids, slots, token positions) of the live rows, each int64 [rows] on the view's device."""
    live = view.group.spec.live_rows(num_tokens)
    rows = np.arange(live.start, live.stop, dtype=np.int64)
    block, slot = np.divmod(rows, view.group.spec.block_size)
    kernel_block, kernel_slot = np.divmod(slot, view.kernel_block_size)
    table = np.asarray(block_table, dtype=np.int64)
    ids = table[block] * view.kernel_blocks_per_block + kernel_block
    device = view.view.device
    return tuple(torch.from_numpy(a).to(device) for a in (ids, kernel_slot, rows))  # type: ignore[return-value]
