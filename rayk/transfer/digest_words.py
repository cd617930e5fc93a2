"""Where the words of a request lie in the digest vector: from first to last by cache, field, global unit,
token class and row group, whoever holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import KVCacheSpec
from rayk.transfer.layer_view import LayerView
from rayk.transfer.token_classes import TokenClasses

Ints = npt.NDArray[np.int64]
Source = tuple[int, str, int, int]
"""(layer, field, unit, token class)"""
Sources = Mapping[Source, int]
"""What is read from one producer rank -> that rank."""


@dataclass(frozen=True, slots=True)
class DigestedCache:
    """One of a layer's caches, whoever keeps it."""

    layer: int
    spec: KVCacheSpec
    seen: KVCacheSpec
    """What tells the live rows."""

    @property
    def key(self) -> tuple[int, str]:
        """Its place in canonical order."""
        return self.layer, self.spec.part

    def num_classes(self, classes: TokenClasses) -> int:
        """A state is one row, which no side divides."""
        return classes.num if self.spec.has_token_rows else 1


def caches_of(groups: Iterable[KVCacheGroup]) -> tuple[DigestedCache, ...]:
    """List all caches of a model in canonical order, in which digests are laid out, however a side groups
    layers."""
    found = (DigestedCache(layer, g.spec, g.seen_by(layer)) for g in groups for layer in g.layers)
    return tuple(sorted(found, key=lambda c: c.key))


@dataclass(frozen=True, eq=False)
class Words:
    """A rank's words of one request, in order. All [words]."""

    index: Ints
    """Places in the digest vector."""
    lane: Ints
    row_group: Ints
    num_in_all: int
    """Words of the vector: those of every unit and token, wherever it is."""


@dataclass(frozen=True, eq=False)
class Lanes:
    """What a rank holds, one lane for each token class of each field of each unit of each cache: a word per
    row group. They are in the order in which digests are made: by token class, then by cache."""

    view: Ints
    field_index: Ints
    unit: Ints
    """[lanes]; the unit is the global one."""
    token_class: Ints
    """[lanes]; 0 of a state."""
    cache: Ints
    """[lanes]: index of the view's cache among all of the model."""
    part: Ints
    """[lanes]: which (cache, field)."""
    part_cache: Ints
    part_units: Ints
    part_classes: Ints
    """[parts]: its cache, and how many units and token classes it has over all ranks."""
    keys: tuple[Source, ...]
    """[lanes]"""
    _known: list[tuple[Sources, Ints]] = field(default_factory=list)
    """The last argument of `ranks`, and what came of it: most requests are read by one plan."""

    def locate(self, first_group: Ints, num_groups: Ints) -> Words:
        """Return the words of a request that has these row groups in each cache of the model."""
        part_words = self.part_units * self.part_classes * num_groups[self.part_cache]
        part_start = np.cumsum(part_words) - part_words
        of_lane = num_groups[self.cache]
        before = np.cumsum(of_lane) - of_lane
        lane = np.repeat(np.arange(len(of_lane)), of_lane)
        within = np.arange(len(lane)) - before[lane]
        in_part = self.unit * self.part_classes[self.part] + self.token_class
        index = (part_start[self.part] + in_part * of_lane)[lane] + within
        return Words(index, lane, first_group[self.cache[lane]] + within, int(part_words.sum()))

    def ranks(self, sources: Sources) -> Ints:
        """[lanes]: the producer rank that each is read from; -1 where it is read from none."""
        if not self._known or self._known[0][0] is not sources:
            found = np.array([sources.get(key, -1) for key in self.keys], dtype=np.int64)
            self._known[:] = [(sources, found)]
        return self._known[0][1]


def make_lanes(views: Sequence[LayerView], caches: Sequence[DigestedCache], classes: TokenClasses) -> Lanes:
    """Make the lanes of views in canonical order, in the vector of all `caches` of the model."""
    parts: dict[tuple[int, int], int] = {}
    part_rows: list[tuple[int, int, int]] = []
    for c, cache in enumerate(caches):
        for f, page_field in enumerate(cache.spec.fields()):
            parts[c, f] = len(part_rows)
            part_rows.append((c, page_field.units, cache.num_classes(classes)))
    cache_of = {cache.key: c for c, cache in enumerate(caches)}
    lanes: list[tuple[int, ...]] = []
    keys: list[Source] = []
    for token_class, seen_views in digested_together(views, classes):
        for v in seen_views:
            view = views[v]
            c = cache_of[view.layer, view.group.spec.part]
            own = token_class if view.group.spec.has_token_rows else 0
            for f, seen in enumerate(view.fields):
                lanes += [(v, f, unit, own, c, parts[c, f]) for unit in seen.units]
                keys += [(view.layer, seen.name, unit, own) for unit in seen.units]
    view_, field_index, unit_, own_class, cache_, part = np.array(lanes, dtype=np.int64).reshape(-1, 6).T
    part_cache, units, num_classes = np.array(part_rows, dtype=np.int64).reshape(-1, 3).T
    of_parts = part_cache, units, num_classes
    return Lanes(view_, field_index, unit_, own_class, cache_, part, *of_parts, tuple(keys))


def digested_together(views: Sequence[LayerView], classes: TokenClasses) -> list[tuple[int, tuple[int, ...]]]:
    """List each pass in which digests are made: a token class, and the indices of the views that have any of
    it. States go with the first one."""
    held = [classes.held(v.tokens) if v.group.spec.has_token_rows else () for v in views]
    wanted = sorted({token_class for of_view in held for token_class in of_view}) or [0]
    return [
        (c, tuple(v for v, of_view in enumerate(held) if c in of_view or (i == 0 and not of_view)))
        for i, c in enumerate(wanted)
    ]


def whole_sources(lanes: Lanes) -> dict[Source, int]:
    """Read everything from one rank, 0."""
    return dict.fromkeys(lanes.keys, 0)
