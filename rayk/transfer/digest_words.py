"""Where the words of a request lie in the digest vector: from first to last by cache, field, global unit and
row group, whoever holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayk.transfer.layer_view import LayerView

Ints = npt.NDArray[np.int64]
Sources = Mapping[tuple[int, str, int], int]
"""(group, field, unit) -> the producer rank it is read from."""


@dataclass(frozen=True, eq=False)
class Words:
    """A rank's words of one request, in order. All [words]."""

    index: Ints
    """Places in the digest vector."""
    lane: Ints
    row_group: Ints
    num_in_all: int
    """Words of the vector: those of every unit, wherever it is."""


@dataclass(frozen=True, eq=False)
class Lanes:
    """What a rank holds, one lane for each field of each unit of each cache: a word per row group."""

    view: Ints
    field_index: Ints
    unit: Ints
    """[lanes]; the unit is the global one."""
    part: Ints
    """[lanes]: which (view, field)."""
    part_view: Ints
    part_units: Ints
    """[parts]: its view, and how many units it has over all ranks."""
    kind: Ints
    """[lanes]: which of `kinds`."""
    kinds: tuple[tuple[int, str, int], ...]
    """(group, field, unit), as those that are read from one producer rank."""

    def locate(self, first_group: Ints, num_groups: Ints) -> Words:
        """Return the words of a request that has these row groups in each view; both [views]."""
        part_words = self.part_units * num_groups[self.part_view]
        part_start = np.cumsum(part_words) - part_words
        of_lane = num_groups[self.view]
        before = np.cumsum(of_lane) - of_lane
        lane = np.repeat(np.arange(len(of_lane)), of_lane)
        within = np.arange(len(lane)) - before[lane]
        index = (part_start[self.part] + self.unit * of_lane)[lane] + within
        return Words(index, lane, first_group[self.view[lane]] + within, int(part_words.sum()))

    def ranks(self, sources: Sources) -> Ints:
        """[lanes]: the producer rank that each is read from. KeyError where one is read from none."""
        return np.array([sources[kind] for kind in self.kinds], dtype=np.int64)[self.kind]


def make_lanes(views: Sequence[LayerView]) -> Lanes:
    """Make the lanes of views in canonical order."""
    kinds: dict[tuple[int, str, int], int] = {}
    parts: list[tuple[int, int]] = []
    lanes: list[tuple[int, int, int, int, int]] = []
    for v, view in enumerate(views):
        for f, (page_field, seen) in enumerate(zip(view.group.spec.fields(), view.fields, strict=True)):
            for unit in seen.units:
                kind = kinds.setdefault((view.group.index, seen.name, unit), len(kinds))
                lanes.append((v, f, unit, len(parts), kind))
            parts.append((v, page_field.units))
    view_, field_index, unit_, part, kind_ = np.array(lanes, dtype=np.int64).reshape(-1, 5).T
    part_view, part_units = np.array(parts, dtype=np.int64).reshape(-1, 2).T
    return Lanes(view_, field_index, unit_, part, part_view, part_units, kind_, tuple(kinds))
