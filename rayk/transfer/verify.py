"""Proof that D's KV is P's: digests through the views that kernels write and read, never through a map.

A digest is one 64-bit word per (layer, field, global unit, row group); see kernels.digest. All words of a
request lie in one vector, whose order comes from the specs and the live rows alone: ranks with other
shards, layouts or block sizes hold the same words for the same KV at the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.digest import DigestedViews, RowPlaces, host_digests
from rayk.kernels.digest.views import NUM_LOCATED
from rayk.transfer.digest_words import Ints, Lanes, Words, make_lanes
from rayk.transfer.digest_words import Sources as Sources
from rayk.transfer.layer_view import LayerView
from rayk.types.errors import KVMismatch

CHUNK_ROWS = 4096
"""Token rows that are widened at once: what lies between takes 4 bytes an element."""

Digests = npt.NDArray[np.int64]
"""[words] of one rank: view by view, field by field, [global unit, live row group]."""
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


class CanonicalViews(tuple[LayerView, ...]):
    """A rank's views in canonical order, with what their digests need to know whatever the request."""

    @cached_property
    def lanes(self) -> Lanes:
        """What the rank has words of."""
        return make_lanes(self)

    @cached_property
    def kinds(self) -> tuple[LayerView, ...]:
        """One view of each set whose live rows lie at the same places, whatever the request."""
        return tuple(self[first] for first in np.unique(self.kind_of, return_index=True)[1])

    @cached_property
    def kind_of(self) -> Ints:
        """[views]: which of `kinds` each is of."""
        seen: dict[object, int] = {}
        keys = [(v.group.index, v.seen, v.kernel_block_size, v.num_blocks) for v in self]
        return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a row in all views of each of `kinds`."""
        of_views = [view.row_bytes for view in self]
        return tuple(np.bincount(self.kind_of, of_views).astype(np.int64).tolist())

    @cached_property
    def digested(self) -> DigestedViews:
        """The packed views of all, in order; their places are those of `kinds`."""
        pairs = [(p, k) for view, k in zip(self, self.kind_of.tolist(), strict=True) for p in view.packed]
        return DigestedViews(*map(tuple, zip(*pairs, strict=True)))

    @cached_property
    def words(self) -> Callable[[int, int], tuple[tuple[range, ...], Words]]:
        """(tokens, rows per group) -> the row groups that the live rows of each of `kinds` lie in, and the
        words of a request that has these. The last are kept: a ticket is looked at, digests are made and
        compared one after the other, and most requests have as many row groups as another."""

        # What is kept holds no reference to all of this, and goes with it.
        lanes, kinds, kind_of = self.lanes, self.kinds, self.kind_of

        @lru_cache(maxsize=NUM_LOCATED)
        def locate(row_groups: tuple[range, ...]) -> Words:
            first = np.array([r.start for r in row_groups], dtype=np.int64)
            count = np.array([len(r) for r in row_groups], dtype=np.int64)
            return lanes.locate(first[kind_of], count[kind_of])

        @lru_cache(maxsize=NUM_LOCATED)
        def of_request(num_tokens: int, rows_per_group: int) -> tuple[tuple[range, ...], Words]:
            live = [view.live_rows(num_tokens) for view in kinds]
            groups = tuple(range(r.start // rows_per_group, -(-r.stop // rows_per_group)) for r in live)
            return groups, locate(groups)

        return of_request


def sorted_views(views: Sequence[LayerView]) -> CanonicalViews:
    """Sort views in canonical order, in which digests are laid out, however a side groups layers."""
    return CanonicalViews(sorted(views, key=lambda v: (v.layer, v.group.spec.part)))


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

    Zero where this rank holds no such unit, and of rows before `first_row`, which begins a row group.
    `block_tables` per group, manager's ids.
    """
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
    made = host_digests(views.digested, places, rows_per_group=rows_per_group)
    if made[-1]:
        on_not_finite()
    found = np.zeros(words.num_in_all, dtype=np.int64)
    found[words.index] = made[:-1]
    return found


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
    in the last bit, since ranks compute them apart.
    """
    views = _canonical(views)
    lanes = views.lanes
    _, words = views.words(num_tokens, rows_per_group)
    theirs = expected[lanes.ranks(sources)[words.lane], words.index]
    wrong: list[WrongWord] = []
    for at in np.flatnonzero(theirs != found[words.index]):
        if words.row_group[at] < first_row // rows_per_group:
            continue
        lane = words.lane[at]
        view = views[lanes.view[lane]]
        rest = (lanes.field_index[lane], lanes.unit[lane], words.row_group[at])
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
        num_bytes_checked(views, num_tokens, first_row),
        unit_name=view.group.spec.fields()[first.field_index].unit_name,
    )


def num_bytes_checked(views: Sequence[LayerView], num_tokens: int, first_row: int = 0) -> int:
    """Count the bytes of a sequence's live rows on this rank from `first_row` on: what its digests cover."""
    views = _canonical(views)
    live = (
        (v.live_rows(num_tokens), row_bytes)
        for v, row_bytes in zip(views.kinds, views.row_bytes, strict=True)
    )
    return sum(len(range(max(rows.start, first_row), rows.stop)) * row_bytes for rows, row_bytes in live)


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
