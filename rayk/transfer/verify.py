"""Proof that D's KV is P's: digests through the views that kernels write and read, never through a map.

A digest is one 64-bit word per (layer, field, global unit, row group); see kernels.digest. All words of a
request lie in one vector, whose order comes from the specs and the live rows alone: ranks with other
shards, layouts or block sizes hold the same words for the same KV at the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.digest import DigestedViews, RowPlaces, digest_views
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
_NUM_LOCATED = 4
"""Numbers of row groups for which it is remembered where words lie: some MB each for the longest requests."""


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

    def row_groups(self, num_tokens: int, rows_per_group: int) -> list[range]:
        """Row groups that the live rows of each of `kinds` lie in."""
        live = [view.live_rows(num_tokens) for view in self.kinds]
        return [range(r.start // rows_per_group, -(-r.stop // rows_per_group)) for r in live]

    def locate(self, row_groups: Sequence[range]) -> Words:
        """Return the words of a request that has these row groups in each of `kinds`. The last are kept:
        digests are compared just after they are made, and most requests have as many row groups as
        another."""
        key = tuple(row_groups)
        words = self._located.get(key)
        if words is None:
            first = np.array([r.start for r in row_groups], dtype=np.int64)
            count = np.array([len(r) for r in row_groups], dtype=np.int64)
            words = self.lanes.locate(first[self.kind_of], count[self.kind_of])
            # What is stored is digested by another thread: nothing found here may be looked for again.
            if len(self._located) >= _NUM_LOCATED:
                self._located.clear()
            self._located[key] = words
        return words

    @cached_property
    def _located(self) -> dict[tuple[range, ...], Words]:
        return {}


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
    row_groups = views.row_groups(num_tokens, rows_per_group)
    words = views.locate(row_groups)
    places = [
        RowPlaces(
            *view.host_places(block_tables[view.group.index], num_tokens, first_row),
            groups.start,
            len(groups),
        )
        for view, groups in zip(views.kinds, row_groups, strict=True)
    ]
    # The only wait for the device.
    made = digest_views(views.digested, places, rows_per_group=rows_per_group).cpu().numpy()
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
    words = views.locate(views.row_groups(num_tokens, rows_per_group))
    theirs = expected[lanes.ranks(sources)[words.lane], words.index]
    wrong: list[WrongWord] = []
    moved = words.row_group >= first_row // rows_per_group
    for at in np.flatnonzero((theirs != found[words.index]) & moved):
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
