"""Takes recurrent states back to the last draft that counted.

A step with drafts leaves the state after all of them in a request's block, and those before in the scratch
(kv.scratch). Once it is known how many drafts count, the one behind the last of these replaces what the block
has. Where a block ends with that token it has the right state already: nothing later was written there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rayk.engine.inputs import BlockTables
from rayk.kernels.uploads import sent
from rayk.kv.caches import CanonicalKVCaches
from rayk.kv.scratch import StateScratch
from rayk.types.batch import Rollback, ScheduledBatch

_WORDS = (torch.int64, torch.int32, torch.int16)
"""What bytes are copied as, where they lie so."""


class StateRollback:
    """Remembers the drafts of each row's last step. One rank's."""

    def __init__(
        self, scratch: StateScratch, tables: Sequence[BlockTables], caches: CanonicalKVCaches
    ) -> None:
        """`tables`: each KV group's, which steps keep up to date."""
        self._scratch = scratch
        self._tables = tuple(tables)
        # A pipeline's stage may have no layer of a group, and in some layouts nothing of it in memory then.
        self._pages = {
            group: [
                _in_words(caches.tensors[at.tensor][:, at.offset : at.offset + at.num_bytes])
                for at in caches.references[group]
            ]
            for group in scratch.groups
            if caches.references[group]
        }
        # by row: tokens before its last step, tokens of that, and how many of these were drafts
        self._steps: dict[int, tuple[int, int, int]] = {}

    def note(self, batch: ScheduledBatch) -> None:
        """Learn what a step computes."""
        for r in batch.requests:
            if r.num_drafts:
                self._steps[r.row] = r.num_computed_tokens, len(r.token_ids), r.num_drafts
            else:
                self._steps.pop(r.row, None)

    def run(self, rollbacks: Sequence[Rollback]) -> None:
        """Take rows back; see EngineRank.roll_back. On a GPU the copies are queued on the current stream."""
        rows, drafts, positions = [], [], []
        for row, num_kept in rollbacks:
            assert row in self._steps, f"row {row} had no drafts in its last step"
            num_before, num_tokens, num_drafts = self._steps[row]
            num_known = num_tokens - num_drafts
            assert num_known <= num_kept <= num_tokens, (row, num_kept, self._steps[row])
            if num_kept < num_tokens:
                rows.append(row)
                drafts.append(num_kept - num_known)
                positions.append(num_before + num_kept - 1)
        if rows:
            self._copy(np.array(rows), np.array(drafts), np.array(positions))

    def _copy(self, rows: np.ndarray, drafts: np.ndarray, positions: np.ndarray) -> None:
        """Fetch the states after so many drafts, which are those after the tokens at `positions`."""
        for group, pages in self._pages.items():
            table = self._tables[group]
            inside = (positions + 1) % table.block_size != 0
            if not inside.any():
                continue
            here = table.ids[rows[inside], positions[inside] // table.block_size].astype(np.int64)
            there = self._scratch.blocks(group, rows[inside], drafts[inside])
            both = torch.from_numpy(np.stack([here, there]))
            to, source = sent(both, pages[0].device)
            for page in pages:
                page.index_copy_(0, to, page.index_select(0, source))


def _in_words(pages: torch.Tensor) -> torch.Tensor:
    """View bytes [blocks, bytes] as the widest words that fit."""
    numbers = (pages.shape[1], pages.stride(0), pages.data_ptr(), pages.storage_offset())
    for word in _WORDS:
        if not any(n % word.itemsize for n in numbers):
            return pages.view(word)
    return pages
