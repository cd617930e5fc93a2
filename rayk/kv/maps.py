"""The run algebra: which bytes of one geometry are which bytes of another. Free of torch.

Two geometries of one KV group name the same canonical coordinates (layer, field, unit, row) at their own
addresses. `match_rows` lists the byte runs between them for a stretch of rows, joining runs that continue on
both sides. Transfer plans, page maps and `rayk explain` are built from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayk.kv.geometry import FieldGeometry, GroupGeometry, canonical_page

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs from a source to a destination: equal-length int64 arrays, ascending destination."""

    source: Ints
    destination: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def tuples(self) -> list[tuple[int, int, int]]:
        """List (source, destination, length) rows, for people and tests."""
        return list(zip(self.source.tolist(), self.destination.tolist(), self.lengths.tolist(), strict=True))


def coalesce(source: Ints, destination: Ints, lengths: Ints) -> Runs:
    """Sort by destination and join runs that continue on both sides."""
    order = np.argsort(destination, kind="stable")
    source, destination, lengths = source[order], destination[order], lengths[order]
    if len(lengths) == 0:
        return Runs(source, destination, lengths)
    starts = np.ones(len(lengths), dtype=bool)
    starts[1:] = (source[1:] != source[:-1] + lengths[:-1]) | (
        destination[1:] != destination[:-1] + lengths[:-1]
    )
    first = np.flatnonzero(starts)
    return Runs(source[first], destination[first], np.add.reduceat(lengths, first))


def match_rows(
    source: GroupGeometry,
    destination: GroupGeometry,
    units: Mapping[str, Sequence[int]],
    *,
    layers: Sequence[int] | None = None,
    source_row: int,
    destination_row: int,
    num_rows: int,
) -> Runs:
    """List runs that copy `num_rows` rows from block 0 of the source to block 0 of the destination.

    `units` names the global units of each field to copy (absent fields are not copied); `layers` must lie on
    both sides (None: all that do). Rows count from the start of each side's manager's block, whoever holds
    them, and may cross kernel blocks but not blocks; those that both sides hold are copied, which may be
    none. A state has one. For another block add `block_id * block_strides(side, runs of the side)` on each
    side, since addresses are affine in the block.
    """
    assert source_row + num_rows <= source.block_rows, "rows leave the source block"
    assert destination_row + num_rows <= destination.block_rows, "rows leave the destination block"
    if layers is None:
        layers = tuple(n for n in destination.layers if n in source.layers)
    from_rows = source.local_rows[source_row : source_row + num_rows]
    to_rows = destination.local_rows[destination_row : destination_row + num_rows]
    held = (from_rows >= 0) & (to_rows >= 0)
    from_rows, to_rows = from_rows[held], to_rows[held]
    positions = [_positions(side, layers) for side in (source, destination)]
    parts: list[tuple[Ints, Ints, Ints]] = []
    for src, dst in zip(source.fields, destination.fields, strict=True):
        assert src.field.name == dst.field.name, (src.field.name, dst.field.name)
        chosen = units.get(src.field.name, ())
        # [unit, layer, row], flat.
        here = _rows(source, src, chosen, from_rows) + positions[0] * src.layer_stride
        there = _rows(destination, dst, chosen, to_rows) + positions[1] * dst.layer_stride
        sizes = np.full(here.size, src.field.row_bytes, dtype=np.int64)
        parts.append((here.reshape(-1), there.reshape(-1), sizes))
    return coalesce(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def page_map(rank: GroupGeometry) -> Runs:
    """List the runs from one block of a rank (offsets from the block's first byte) to the canonical page."""
    whole = canonical_page(rank.group)
    units = {f.field.name: f.units for f in rank.fields}
    return match_rows(rank, whole, units, source_row=0, destination_row=0, num_rows=rank.block_rows)


def block_strides(group: GroupGeometry, addresses: Ints) -> Ints:
    """Compute the distance from each address of block 0 to the same place in the next manager's block, int64.
    It is one number unless blocks lie inside heads or token slots, where each bundle has its own."""
    strides = {f.block_stride for f in group.fields}
    ratio = group.kernel_blocks_per_block
    if len(strides) == 1:
        return np.full(len(addresses), strides.pop() * ratio, dtype=np.int64)
    # A bundle extends to the next bundle's first field: inside each layer, or around all of them.
    starts = np.array([bundle[0].offset for bundle in group.bundles], dtype=np.int64)
    steps = np.array([bundle[0].block_stride * ratio for bundle in group.bundles], dtype=np.int64)
    layer = group.fields[0].layer_stride
    # They count from the start of the region.
    inside, starts = addresses - starts[0], starts - starts[0]
    inside = inside % layer if layer > starts[-1] else inside
    found: Ints = steps[np.searchsorted(starts, inside, side="right") - 1]
    return found


def _positions(group: GroupGeometry, layers: Sequence[int]) -> Ints:
    """Find the positions of layers on a rank, int64 [1, layers, 1]."""
    position_of = {layer: position for position, layer in enumerate(group.layers)}
    return np.array([position_of[layer] for layer in layers], dtype=np.int64)[None, :, None]


def _rows(group: GroupGeometry, field: FieldGeometry, units: Sequence[int], rows: Ints) -> Ints:
    """Address units and rows of the rank's block 0 of the layer at position 0, int64 [units, 1, rows]."""
    slot_of = {unit: slot for slot, unit in enumerate(field.units)}
    slots = np.array([slot_of[u] for u in units], dtype=np.int64)
    kernel_block, row = np.divmod(rows, group.kernel_block_size)
    in_block = kernel_block * field.block_stride + row * field.row_stride
    addresses: Ints = field.offset + slots[:, None, None] * field.unit_stride + in_block[None, None, :]
    return addresses
