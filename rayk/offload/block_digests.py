"""Digests of what a host tier holds, by block: made when a page comes, and kept as long as it is there.

What is lent carries the words of what was stored: a load then proves that nobody changed a page meanwhile,
and no pass over the pages precedes it. A digest is a sum over rows, each keyed by its position
(kernels.digest), so that the words of a block's parts add up to those of row groups.

Lanes, words and row groups as in transfer.digest_words. A cell is a run of rows, as many as divide all blocks
and row groups. L: lanes of one kind, n: blocks of a sequence, m: its cells, C: cells of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rayk.kernels.digest import RowPlaces
from rayk.transfer.digest_words import Ints
from rayk.transfer.layer_view import LayerView
from rayk.transfer.verify import CanonicalViews, Digests, digest_places

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class _CachedWords:
    """What is known of caches whose live rows lie at the same places."""

    view: LayerView  # any of them
    lanes: Ints  # [L]
    words: Ints
    """[blocks, C, L]; of a state, which is one row, C is 1. 0 of cells that have none of the rows."""
    rows: Ints  # [blocks, 2]: the positions that the words cover, the first and the one after the last

    def forget(self, ids: Sequence[int] | Ints) -> None:
        self.words[ids], self.rows[ids] = 0, 0


@dataclass(frozen=True, eq=False)
class _SequenceRows:
    """The rows of a sequence in those caches."""

    live: range  # positions
    ids: Ints  # [n]: the blocks they lie in
    rows: Ints  # [n, 2]: which of them lie in each
    index: range  # [n]: which block of the sequence each is
    live_cells: range  # that they lie in, counted from position 0
    cells: range  # [m]: all of those blocks; of a state the one that its row lies in
    block: Ints
    within: Ints  # [m]: which of the blocks each lies in, and where in it


class BlockDigests:
    """Its owner has to `forget` blocks that are handed out for something else."""

    def __init__(self, views: CanonicalViews, num_blocks: int, rows_per_group: int) -> None:
        """`views` are those of all of the tier's caches, in host memory."""
        self._views = views
        self._rows_per_group = rows_per_group
        self._cell = math.gcd(rows_per_group, *(v.group.spec.block_size for v in views.kinds))
        kind_of_lane = views.kind_of[views.lanes.view]
        self._kept = []
        for kind, view in enumerate(views.kinds):
            lanes = np.flatnonzero(kind_of_lane == kind)
            spec = view.group.spec
            num_cells = spec.block_size // self._cell if spec.has_token_rows else 1
            words = np.zeros((num_blocks, num_cells, len(lanes)), dtype=np.int64)
            self._kept.append(_CachedWords(view, lanes, words, np.zeros((num_blocks, 2), dtype=np.int64)))
        self._kind_of_lane = kind_of_lane

    def forget(self, block_ids: Iterable[int]) -> None:
        ids = list(block_ids)
        for kept in self._kept:
            kept.forget(ids)

    def prove(self, tables: Tables, num_tokens: int, first_row: int = 0) -> Digests:
        """Compute digests of a sequence's live rows from `first_row` on, as `compute_digests` gives them, of
        what is in memory now. They are kept, but of rows that are known."""
        spans = self._spans(tables, num_tokens, first_row)
        now, _ = self._update(tables, spans, reads_all=True)
        return self._sum(spans, now, num_tokens)

    def recall(self, tables: Tables, num_tokens: int, first_row: int = 0) -> Digests:
        """The same, of what was in the blocks when they were digested first.

        A block is read only where other rows of it are known than the wanted ones. If one of either changed
        since, the word is none that a reader will find.
        """
        spans = self._spans(tables, num_tokens, first_row)
        both = [*zip(self._kept, spans, strict=True)]
        if all((kept.rows[span.ids] == span.rows).all() for kept, span in both):
            return self._sum(spans, [k.words[s.ids[s.block], s.within].T for k, s in both], num_tokens)
        _, before = self._update(tables, spans, reads_all=False)
        return self._sum(spans, before, num_tokens)

    def _update(
        self, tables: Tables, spans: Sequence[_SequenceRows], *, reads_all: bool
    ) -> tuple[list[Ints], list[Ints]]:
        """Keep what the spans' rows tell, and return their words by kind and cell, [L, m]: as they are now
        (0 of blocks that are known so, unless `reads_all`), and as they were when digested first.

        Where other rows of a block are known, what these were less what they are now is added to all words
        that are read now: nothing, unless one changed.
        """
        both = [*zip(self._kept, spans, strict=True)]
        cells = [span.cells for span in spans]
        known = [kept.rows[span.ids] for kept, span in both]
        is_same = [(k == s.rows).all(axis=1) for k, s in zip(known, spans, strict=True)]
        is_other = [
            (k[:, 1] > k[:, 0]) & ~same & kept.view.group.spec.has_token_rows
            for k, same, kept in zip(known, is_same, self._kept, strict=True)
        ]
        hulls = [
            np.stack([np.minimum(k[:, 0], s.rows[:, 0]), np.maximum(k[:, 1], s.rows[:, 1])], axis=1)
            for k, s in zip(known, spans, strict=True)
        ]
        wanted = [s.rows if reads_all else s.rows[~same] for s, same in zip(spans, is_same, strict=True)]
        now = self._read(tables, wanted, cells)
        of_hulls = self._read(tables, [h[o] for h, o in zip(hulls, is_other, strict=True)], cells)
        of_known = self._read(tables, [k[o] for k, o in zip(known, is_other, strict=True)], cells)
        before = []
        for i, (kept, span) in enumerate(both):
            at = span.ids[span.block], span.within
            words = kept.words[at].T
            same, other = is_same[i][span.block], is_other[i][span.block]
            changed = np.where(other, words - of_known[i], 0)
            before.append(np.where(same, words, now[i] + changed))
            kept.words[at] = np.where(other, of_hulls[i] + changed, before[i]).T
            kept.rows[span.ids] = np.where(is_other[i][:, None], hulls[i], span.rows)
        return now, before

    def find_changed(self, tables: Tables, num_tokens: int, first_row: int = 0) -> list[int]:
        """List blocks of a sequence that do not hold any more what they held when they were digested."""
        return self._changed(tables, [s.index for s in self._spans(tables, num_tokens, first_row)])

    def find_changed_in(self, tables: Tables) -> list[int]:
        """The same of the blocks in these tables of a sequence: null blocks stand for those that nobody asks
        for, and rows may be dead."""
        return self._changed(tables, [range(len(tables[k.view.group.index])) for k in self._kept])

    def _changed(self, tables: Tables, indices: Sequence[range]) -> list[int]:
        """`indices`: which blocks of its table are looked at, by kind."""
        changed: set[int] = set()
        ids_of = [
            np.array(tables[k.view.group.index], dtype=np.int64)[i.start : i.stop]
            for k, i in zip(self._kept, indices, strict=True)
        ]
        cells = [
            range(i.start * n, i.stop * n)
            for i, k in zip(indices, self._kept, strict=True)
            for n in [k.view.group.spec.block_size // self._cell]
        ]
        rows = [k.rows[ids] for k, ids in zip(self._kept, ids_of, strict=True)]
        for kept, ids, found in zip(self._kept, ids_of, self._read(tables, rows, cells), strict=True):
            # Of a state's cells one has its row.
            num_cells, size = kept.words.shape[1], kept.view.group.spec.block_size
            shape = len(kept.lanes), len(ids), num_cells, size // self._cell // num_cells
            by_block = found.reshape(shape).sum(axis=3)
            is_other = (kept.words[ids] != by_block.transpose(1, 2, 0)).any(axis=(1, 2))
            changed.update(ids[is_other].tolist())
        return sorted(changed)

    def _spans(self, tables: Tables, num_tokens: int, first_row: int) -> list[_SequenceRows]:
        return [self._span(k.view, tables[k.view.group.index], num_tokens, first_row) for k in self._kept]

    def _span(self, view: LayerView, table: Sequence[int], num_tokens: int, first_row: int) -> _SequenceRows:
        size, cell, live = view.group.spec.block_size, self._cell, view.live_rows(num_tokens)
        live = range(max(live.start, first_row), max(live.start, first_row, live.stop))
        index = _parts(live, size)
        ids = np.array(table, dtype=np.int64)[index.start : index.stop]
        starts = np.arange(index.start, index.stop) * size
        rows = np.stack([np.maximum(live.start, starts), np.minimum(live.stop, starts + size)], axis=1)
        cells = live_cells = _parts(live, cell)
        if view.group.spec.has_token_rows:
            cells = range(index.start * size // cell, index.stop * size // cell)
        block = np.arange(cells.start, cells.stop) * cell // size
        within = np.arange(cells.start, cells.stop) - block * (size // cell)
        if not view.group.spec.has_token_rows:
            assert len(live) <= 1, "a state is one row"
            within[:] = 0
        return _SequenceRows(live, ids, rows, index, live_cells, cells, block - index.start, within)

    def _sum(self, spans: Sequence[_SequenceRows], cells_of: Sequence[Ints], num_tokens: int) -> Digests:
        """Add up the words of each kind's cells to those of row groups."""
        per_group, cell = self._rows_per_group, self._cell
        row_groups, words = self._views.words(num_tokens, per_group)
        before = self._before([len(groups) for groups in row_groups])
        made = np.zeros(len(words.index), dtype=np.int64)
        for i, (kept, span, cells) in enumerate(zip(self._kept, spans, cells_of, strict=True)):
            if not span.live:
                continue
            groups = np.array(_parts(span.live, per_group))
            first = np.maximum(groups * per_group, span.live.start) // cell - span.live_cells.start
            where = before[kept.lanes][:, None] + groups - row_groups[i].start
            skipped = span.live_cells.start - span.cells.start
            made[where] = np.add.reduceat(cells[:, skipped:][:, : len(span.live_cells)], first, axis=1)
        found = np.zeros(words.num_in_all, dtype=np.int64)
        found[words.index] = made
        return found

    def _read(self, tables: Tables, rows_of: Sequence[Ints], cells_of: Sequence[range]) -> list[Ints]:
        """Words, [L, cells] of each kind, of what is in memory at some positions: `rows_of` each kind,
        [.., 2], the first and the one after the last, which lie in `cells_of` it."""
        places = []
        for kept, rows, cells in zip(self._kept, rows_of, cells_of, strict=True):
            view = kept.view
            found = view.places_of(tables[view.group.index], _positions(rows))
            places.append(RowPlaces(*found, cells.start, len(cells)))
        if all(len(at.rows) == 0 for at in places):
            return [
                np.zeros((len(kept.lanes), len(cells)), dtype=np.int64)
                for kept, cells in zip(self._kept, cells_of, strict=True)
            ]
        made, _ = digest_places(self._views, places, self._cell)
        before = self._before([len(cells) for cells in cells_of])
        return [
            made[before[kept.lanes][:, None] + np.arange(len(cells))]
            for kept, cells in zip(self._kept, cells_of, strict=True)
        ]

    def _before(self, of_kind: Sequence[int]) -> Ints:
        """[lanes]: how many words come before each one's, where lanes of a kind have so many."""
        of_lane = np.array(of_kind, dtype=np.int64)[self._kind_of_lane]
        return np.cumsum(of_lane) - of_lane


def _parts(rows: range, size: int) -> range:
    """Return the runs of so many positions that rows lie in, counted from position 0."""
    return range(rows.start // size, -(-rows.stop // size) if rows else rows.start // size)


def _positions(rows: Ints) -> Ints:
    """It lists all positions of the runs, [.., 2]; a run that ends before it begins has none."""
    starts, lengths = rows[..., 0].ravel(), np.maximum(rows[..., 1] - rows[..., 0], 0).ravel()
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())
