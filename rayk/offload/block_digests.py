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
import numpy.typing as npt
import torch

from rayk.kernels.digest import RowPlaces, digest_views
from rayk.transfer.digest_words import Ints
from rayk.transfer.verify import CanonicalViews, Digests, LayerView

Bools = npt.NDArray[np.bool_]
Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class _Kept:
    """What is known of caches whose live rows lie at the same places."""

    view: LayerView
    """Any of them."""
    lanes: Ints
    """[L]"""
    words: Ints
    """[blocks, C, L]; of a state, which is one row, C is 1."""
    rows: Ints
    """[blocks, 2]: the positions that the words cover, the first and the one after the last."""


@dataclass(frozen=True, eq=False)
class _Span:
    """The rows of a sequence in those caches."""

    live: range
    """Positions."""
    ids: Ints
    """[n]: the blocks they lie in."""
    rows: Ints
    """[n, 2]: which of them lie in each."""
    cells: range
    """That they lie in, counted from position 0."""
    block: Ints
    within: Ints
    """[m]: which of the blocks each lies in, and where in it."""


class BlockDigests:
    """See the module. `forget` blocks that are handed out for something else."""

    def __init__(self, views: CanonicalViews, num_blocks: int, rows_per_group: int) -> None:
        """`views`: of all of the tier's caches, in host memory."""
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
            self._kept.append(_Kept(view, lanes, words, np.zeros((num_blocks, 2), dtype=np.int64)))
        self._kind_of_lane = kind_of_lane

    def forget(self, block_ids: Iterable[int]) -> None:
        """These are about to hold something else."""
        ids = list(block_ids)
        for kept in self._kept:
            kept.rows[ids] = 0

    def prove(self, tables: Tables, num_tokens: int, first_row: int = 0) -> Digests:
        """Digests of a sequence's live rows from `first_row` on, as `compute_digests` gives them, of what is
        in memory now. They are kept."""
        return self._digest(self._spans(tables, num_tokens, first_row), tables, num_tokens, first_row, None)

    def recall(self, tables: Tables, num_tokens: int, first_row: int = 0) -> Digests:
        """The same, of what was in the blocks when they were digested first."""
        spans = self._spans(tables, num_tokens, first_row)
        return self._digest(spans, tables, num_tokens, first_row, [*map(_is_known, self._kept, spans)])

    def find_changed(self, tables: Tables, num_tokens: int, first_row: int = 0) -> list[int]:
        """Blocks of a sequence that do not hold any more what they held when they were digested."""
        spans = self._spans(tables, num_tokens, first_row)
        changed: set[int] = set()
        found = self._read(spans, tables, num_tokens, first_row, None)
        for kept, span, cells in zip(self._kept, spans, found, strict=True):
            is_other = (kept.words[span.ids[span.block], span.within] != cells.T).any(axis=1)
            is_other &= _is_known(kept, span)[span.block]
            changed.update(span.ids[span.block[is_other]].tolist())
        return sorted(changed)

    def _spans(self, tables: Tables, num_tokens: int, first_row: int) -> list[_Span]:
        return [self._span(k.view, tables[k.view.group.index], num_tokens, first_row) for k in self._kept]

    def _span(self, view: LayerView, table: Sequence[int], num_tokens: int, first_row: int) -> _Span:
        size, cell, live = view.group.spec.block_size, self._cell, view.live_rows(num_tokens)
        live = range(max(live.start, first_row), max(live.start, first_row, live.stop))
        index = _parts(live, size)
        ids = np.array(table, dtype=np.int64)[index.start : index.stop]
        starts = np.arange(index.start, index.stop) * size
        rows = np.stack([np.maximum(live.start, starts), np.minimum(live.stop, starts + size)], axis=1)
        cells = _parts(live, cell)
        block = np.arange(cells.start, cells.stop) * cell // size
        within = np.arange(cells.start, cells.stop) - block * (size // cell)
        if not view.group.spec.has_token_rows:
            assert len(live) <= 1, "a state is one row"
            within[:] = 0
        return _Span(live, ids, rows, cells, block - index.start, within)

    def _digest(
        self,
        spans: Sequence[_Span],
        tables: Tables,
        num_tokens: int,
        first_row: int,
        known: Sequence[Bools] | None,
    ) -> Digests:
        """`known`: of each kind, [n]; None: nothing is."""
        per_group, cell = self._rows_per_group, self._cell
        row_groups = self._views.row_groups(num_tokens, per_group)
        words = self._views.locate(row_groups)
        before = self._before([len(groups) for groups in row_groups])
        made = np.zeros(len(words.index), dtype=np.int64)
        cells_of = self._read(spans, tables, num_tokens, first_row, known)
        for i, (kept, span, cells) in enumerate(zip(self._kept, spans, cells_of, strict=True)):
            if not span.live:
                continue
            at = span.ids[span.block], span.within
            if known is not None:
                cells[:, known[i][span.block]] = kept.words[at][known[i][span.block]].T
            kept.words[at], kept.rows[span.ids] = cells.T, span.rows
            groups = np.array(_parts(span.live, per_group))
            first = np.maximum(groups * per_group, span.live.start) // cell - span.cells.start
            where = before[kept.lanes][:, None] + groups - row_groups[i].start
            made[where] = np.add.reduceat(cells, first, axis=1)
        found = np.zeros(words.num_in_all, dtype=np.int64)
        found[words.index] = made
        return found

    def _read(
        self,
        spans: Sequence[_Span],
        tables: Tables,
        num_tokens: int,
        first_row: int,
        known: Sequence[Bools] | None,
    ) -> list[Ints]:
        """Of each kind the words of its cells, [L, cells]; 0 of blocks that are known."""
        places = []
        for i, (kept, span) in enumerate(zip(self._kept, spans, strict=True)):
            is_known = known[i] if known is not None else np.zeros(len(span.ids), dtype=bool)
            table = tables[kept.view.group.index]
            rows = _rows_of(kept.view, table, num_tokens, first_row, is_known)
            places.append(RowPlaces(*rows, span.cells.start, len(span.cells)))
        if all(len(at.rows) == 0 for at in places):
            return [
                np.zeros((len(k.lanes), len(s.cells)), np.int64)
                for k, s in zip(self._kept, spans, strict=True)
            ]
        made = digest_views(self._views.digested, places, rows_per_group=self._cell).numpy()
        before = self._before([len(span.cells) for span in spans])
        return [
            made[before[kept.lanes][:, None] + np.arange(len(span.cells))]
            for kept, span in zip(self._kept, spans, strict=True)
        ]

    def _before(self, of_kind: Sequence[int]) -> Ints:
        """[lanes]: how many words come before each one's, where lanes of a kind have so many."""
        of_lane = np.array(of_kind, dtype=np.int64)[self._kind_of_lane]
        return np.cumsum(of_lane) - of_lane


def _parts(rows: range, size: int) -> range:
    """The runs of so many positions that rows lie in, counted from position 0."""
    return range(rows.start // size, -(-rows.stop // size) if rows else rows.start // size)


def _is_known(kept: _Kept, span: _Span) -> Bools:
    """[n]: blocks whose words are kept, of just these rows."""
    known: Bools = (kept.rows[span.ids] == span.rows).all(axis=1)
    return known


def _rows_of(
    view: LayerView, table: Sequence[int], num_tokens: int, first_row: int, is_known: Bools
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LayerView.places, without the blocks that are known."""
    if is_known.all():
        none = torch.zeros(0, dtype=torch.int64)
        return none, none, none
    ids, slots, positions = view.places(table, num_tokens, first_row)
    if not is_known.any():
        return ids, slots, positions
    block = positions.numpy() // view.group.spec.block_size
    wanted = torch.from_numpy(~is_known[block - block[0]])
    return ids[wanted], slots[wanted], positions[wanted]
