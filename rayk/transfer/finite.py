"""Where a request's KV or recurrent states are first NaN or infinite. Rows that nobody wrote never count."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from rayk.transfer.layer_view import LayerView
from rayk.transfer.verify import CHUNK_ROWS


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class NotFinitePlace:
    """Ordered as values follow from each other: by layer, then token."""

    layer: int
    token: int
    field: str
    unit: int
    unit_name: str
    name: str = dataclasses.field(default="", compare=False)
    """The layer's, where it is not its number's."""

    def __str__(self) -> str:
        layer = self.name or f"layer {self.layer}"
        return f"{layer}, {self.field}, {self.unit_name} {self.unit}, token {self.token}"


def first_not_finite(
    views: Sequence[LayerView], block_tables: Sequence[Sequence[int]], num_tokens: int, first_row: int = 0
) -> NotFinitePlace | None:
    """Return the first place among a sequence's live rows on this rank, from `first_row` on; None where all
    are finite. `block_tables` per group, manager's ids. As they are stored: of a quantised cache, NaN codes
    and scales."""
    for view in sorted(views, key=lambda v: v.layer):
        found = _first_in(view, block_tables[view.group.index], num_tokens, first_row)
        if found is not None:
            return found
    return None


def _first_in(
    view: LayerView, block_table: Sequence[int], num_tokens: int, first_row: int
) -> NotFinitePlace | None:
    rows = (torch.split(column, CHUNK_ROWS) for column in view.places(block_table, num_tokens, first_row))
    for block_ids, in_block, positions in zip(*rows, strict=True):
        places = []
        for seen, page_field in zip(view.fields, view.group.spec.fields(), strict=True):
            if not seen.view.dtype.is_floating_point:
                continue
            values = seen.view[block_ids, :, in_block].float()  # [rows, units, elements]
            bad = (~values.isfinite()).any(-1).nonzero()
            if len(bad):
                row, unit = bad[0].tolist()
                token = int(positions[row])
                what = seen.name, seen.units[unit], page_field.unit_name
                name = view.group.name_of(view.layer)
                places.append(NotFinitePlace(view.layer, token, *what, name))
        if places:
            return min(places)
    return None
