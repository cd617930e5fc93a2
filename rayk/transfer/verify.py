"""Proof that D's KV is P's: digests through the views that kernels write and read, never through a map.

A digest is one 64-bit word per (layer, field, global unit, token class, row group); see kernels.digest. All
words of a request lie in one vector, whose order comes from the specs and the live rows alone: ranks with
other shards, layouts or block sizes hold the same words for the same KV at the same places. A token class
lies on one rank of either side for each unit (`TokenClasses`): where no side deals tokens there is one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.digest import DigestedViews, RowPlaces, host_digests
from rayk.kernels.digest.views import NUM_LOCATED
from rayk.kv.groups import CacheKey, KVCacheGroup
from rayk.transfer.digest_words import (
    DigestedCache,
    Ints,
    Lanes,
    Words,
    caches_of,
    digested_together,
    make_lanes,
)
from rayk.transfer.digest_words import Sources as Sources
from rayk.transfer.layer_view import LayerView
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses
from rayk.types.errors import KVMismatch

CHUNK_ROWS = 4096
"""Token rows that are widened at once: what lies between takes 4 bytes an element."""

Digests = npt.NDArray[np.int64]
"""[words] of one rank: cache by cache of the model, field by field, [global unit, token class, live row
group]."""
Prove = Callable[[Sequence[Sequence[int]], int, int], Digests]
"""Digests of what is in memory now: (block tables, tokens, first row), as `compute_digests` gives them."""
Rows = dict[tuple[str, int], npt.NDArray[np.uint8]]
"""(field, global unit) -> uint8 [rows, row_bytes], rows in order of token position."""


@dataclass(frozen=True, slots=True, order=True)
class WrongWord:
    """One digest word that differs, ordered by canonical coordinate."""

    group: int
    layer: int
    field_index: int
    unit: int
    row_group: int
    token_class: int = 0


class CanonicalViews(tuple[LayerView, ...]):
    """A rank's views in canonical order, with what their digests need to know whatever the request."""

    caches: tuple[DigestedCache, ...]
    """All of the model, those of the views among them."""
    classes: TokenClasses

    def __new__(
        cls,
        views: Iterable[LayerView] = (),
        caches: Sequence[DigestedCache] | None = None,
        classes: TokenClasses = ONE_CLASS,
    ) -> Self:
        """`caches`: None for those of the views alone."""
        made = super().__new__(cls, views)
        own = (DigestedCache(v.layer, v.group.spec, v.seen) for v in made)
        made.caches, made.classes = tuple(own if caches is None else caches), classes
        return made

    @cached_property
    def lanes(self) -> Lanes:
        """What the rank has words of."""
        return make_lanes(self, self.caches, self.classes)

    @cached_property
    def kinds(self) -> tuple[LayerView, ...]:
        """One view of each set whose live rows lie at the same places, whatever the request."""
        return tuple(self[first] for first in np.unique(self.kind_of, return_index=True)[1])

    @cached_property
    def kind_of(self) -> Ints:
        """[views]: which of `kinds` each is of."""
        seen: dict[object, int] = {}
        keys = [(v.group.index, v.seen, v.tokens, v.kernel_block_size, v.num_blocks) for v in self]
        return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a row in all views of each of `kinds`."""
        of_views = [view.row_bytes for view in self]
        return tuple(np.bincount(self.kind_of, of_views).astype(np.int64).tolist())

    @cached_property
    def passes(self) -> tuple[tuple[int, DigestedViews], ...]:
        """Each token class of which there is any, with the packed views that have some, in order (see
        `digested_together`); their places are those of `kinds`."""
        kind_of, made = self.kind_of.tolist(), []
        for token_class, indices in digested_together(self, self.classes):
            pairs = [(packed, kind_of[v]) for v in indices for packed in self[v].packed]
            made.append((token_class, DigestedViews(tuple(p for p, _ in pairs), tuple(k for _, k in pairs))))
        return tuple(made)

    @cached_property
    def words(self) -> Callable[[int, int], tuple[tuple[range, ...], Words]]:
        """(tokens, rows per group) -> the row groups that the live rows of each of `kinds` lie in, and the
        words of a request that has these. The last are kept: a ticket is looked at, digests are made and
        compared one after the other, and most requests have as many row groups as another."""

        # What is kept holds no reference to all of this, and goes with it.
        lanes, seen = self.lanes, tuple(dict.fromkeys(cache.seen for cache in self.caches))
        of_cache = np.array([seen.index(cache.seen) for cache in self.caches], dtype=np.int64)
        of_key = dict(zip((cache.key for cache in self.caches), of_cache.tolist(), strict=True))
        of_kind = [of_key[view.layer, view.group.spec.part] for view in self.kinds]

        @lru_cache(maxsize=NUM_LOCATED)
        def locate(row_groups: tuple[range, ...]) -> Words:
            first = np.array([r.start for r in row_groups], dtype=np.int64)
            count = np.array([len(r) for r in row_groups], dtype=np.int64)
            return lanes.locate(first[of_cache], count[of_cache])

        @lru_cache(maxsize=NUM_LOCATED)
        def of_request(num_tokens: int, rows_per_group: int) -> tuple[tuple[range, ...], Words]:
            live = [spec.live_rows(num_tokens) for spec in seen]
            groups = tuple(range(r.start // rows_per_group, -(-r.stop // rows_per_group)) for r in live)
            return tuple(groups[i] for i in of_kind), locate(groups)

        return of_request

    def without(self, keys: Collection[CacheKey], groups: Iterable[KVCacheGroup]) -> CanonicalViews:
        """Return the views but those of these caches, whose words a producer's digests have where they are
        among its `groups`. Layers that may lack come last, and no other word lies elsewhere then."""
        if not keys:
            return self
        theirs = [cache for cache in caches_of(groups) if cache.key in keys]
        caches = sorted([*(c for c in self.caches if c.key not in keys), *theirs], key=lambda c: c.key)
        views = [v for v in self if (v.layer, v.group.spec.part) not in keys]
        return CanonicalViews(views, caches, self.classes)


def sorted_views(
    views: Sequence[LayerView],
    groups: Iterable[KVCacheGroup] | None = None,
    classes: TokenClasses = ONE_CLASS,
) -> CanonicalViews:
    """Sort views in canonical order, in which digests are laid out, however a side groups layers. `groups`:
    those of all ranks, where some keep other layers than others; `classes`: see TokenClasses."""
    in_order = sorted(views, key=lambda v: (v.layer, v.group.spec.part))
    return CanonicalViews(in_order, None if groups is None else caches_of(groups), classes)


def compute_digests(
    views: Sequence[LayerView],
    block_tables: Sequence[Sequence[int]],
    num_tokens: int,
    rows_per_group: int,
    first_row: int = 0,
    on_not_finite: Callable[[], None] = lambda: None,
) -> Digests:
    """Compute digests of a sequence's live rows, [words]; `views` in canonical order. `on_not_finite`: told
    where any value is NaN or infinite.

    Zero where this rank holds no such layer, unit or token, and of rows before `first_row`, which begins a
    row group. `block_tables` per group, manager's ids."""
    assert first_row % rows_per_group == 0, "a row group is digested whole"
    views = _canonical(views)
    row_groups, words = views.words(num_tokens, rows_per_group)
    places = [
        RowPlaces(
            *view.host_places(block_tables[view.group.index], num_tokens, first_row),
            groups.start,
            len(groups),
        )
        for view, groups in zip(views.kinds, row_groups, strict=True)
    ]
    made, is_finite = digest_places(views, places, rows_per_group)
    if not is_finite:
        on_not_finite()
    found = np.zeros(words.num_in_all, dtype=np.int64)
    found[words.index] = made
    return found


def digest_places(
    views: CanonicalViews, places: Sequence[RowPlaces], rows_per_group: int
) -> tuple[Ints, bool]:
    """Compute the words of rows, lane by lane, and whether all values of these are finite. `places`: of each
    of `kinds`."""
    made = []
    for token_class, digested in views.passes:
        here = places
        if views.classes.num > 1:
            here = [
                _of_class(views.classes, token_class, at) if view.group.spec.has_token_rows else at
                for view, at in zip(views.kinds, places, strict=True)
            ]
        made.append(host_digests(digested, here, rows_per_group=rows_per_group))
    return np.concatenate([words[:-1] for words in made]), not any(words[-1] for words in made)


def _of_class(classes: TokenClasses, token_class: int, at: RowPlaces) -> RowPlaces:
    chosen = classes.of(at.rows) == token_class
    return replace(at, block_ids=at.block_ids[chosen], slots=at.slots[chosen], rows=at.rows[chosen])


def compare_digests(
    views: Sequence[LayerView],
    expected: Digests,
    found: Digests,
    sources: Sources,
    num_tokens: int,
    rows_per_group: int,
    first_row: int = 0,
) -> list[WrongWord]:
    """List words that differ, in canonical order: of row groups from position `first_row` on.

    `expected`: [producer rank, words]. Of each unit only the rank in `sources` counts: replicas may differ
    in the last bit, since ranks compute them apart. What this rank has and reads from nobody differs.
    """
    views = _canonical(views)
    lanes = views.lanes
    _, words = views.words(num_tokens, rows_per_group)
    ranks = lanes.ranks(sources)[words.lane]
    differs = (expected[ranks, words.index] != found[words.index]) | (ranks < 0)
    wrong: list[WrongWord] = []
    for at in np.flatnonzero(differs):
        if words.row_group[at] < first_row // rows_per_group:
            continue
        lane = words.lane[at]
        view = views[lanes.view[lane]]
        rest = lanes.field_index[lane], lanes.unit[lane], words.row_group[at], lanes.token_class[lane]
        wrong.append(WrongWord(view.group.index, view.layer, *map(int, rest)))
    return sorted(wrong)


def digest_mismatch(
    request_id: str,
    views: Sequence[LayerView],
    wrong: Sequence[WrongWord],
    num_tokens: int,
    rows_per_group: int,
    first_row: int = 0,
) -> KVMismatch:
    """Return what the digests alone can say about the first wrong word: the row group, not yet the token."""
    first = wrong[0]
    view = next(v for v in views if (v.group.index, v.layer) == (first.group, first.layer))
    rows = view.held_rows(num_tokens)
    rows = rows[rows // rows_per_group == first.row_group]
    if view.group.spec.has_token_rows:
        rows = rows[_canonical(views).classes.of(rows) == first.token_class]
    start, last = int(rows[0]), int(rows[-1])
    are_all = last - start + 1 == len(rows)
    several = f"among {'' if are_all else f'{len(rows)} of '}tokens {start} to {last}"
    tokens = several if len(rows) > 1 else f"at token {start}"
    return KVMismatch(
        request_id,
        first.layer,
        first.group,
        view.fields[first.field_index].name,
        first.unit,
        start,
        f"digests differ for {len(wrong)} of the rank's words; first {tokens}",
        num_bytes_checked(views, num_tokens, first_row),
        unit_name=view.group.spec.fields()[first.field_index].unit_name,
        draft_layer=view.group.draft_number(first.layer),
    )


def num_bytes_checked(views: Sequence[LayerView], num_tokens: int, first_row: int = 0) -> int:
    """Count the bytes of a sequence's live rows on this rank from `first_row` on: what its digests cover."""
    views = _canonical(views)
    counted = 0
    for view, row_bytes in zip(views.kinds, views.row_bytes, strict=True):
        live = view.live_rows(num_tokens)
        start, stop = max(live.start, first_row), max(live.start, first_row, live.stop)
        counted += (view.tokens.count(stop) - view.tokens.count(start)) * row_bytes
    return counted


def fetch_rows(view: LayerView, block_table: Sequence[int], num_tokens: int, first_row: int = 0) -> Rows:
    """Fetch the live rows of one cache of a layer, from `first_row` on, as raw bytes, read through its bound
    views."""
    block_ids, in_block, _ = view.places(block_table, num_tokens, first_row)
    rows: Rows = {}
    for field in view.fields:
        values = field.view[block_ids, :, in_block].contiguous().cpu()  # [rows, units, elements]
        content = values.view(torch.uint8).numpy()
        rows.update(((field.name, unit), content[:, u]) for u, unit in enumerate(field.units))
    return rows


def _canonical(views: Sequence[LayerView]) -> CanonicalViews:
    """Return views that may be but some of a rank's."""
    return views if isinstance(views, CanonicalViews) else CanonicalViews(views)
