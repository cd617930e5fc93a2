"""Where a step with drafts leaves the states that it may have to be taken back to: blocks behind the pool's.

A draft that is rejected has no place in a recurrent state, which cannot be made smaller again as rows of
tokens can. So the state after each token that a draft follows is kept until it is known which drafts count.
These blocks have ids of their own, which no block table holds: kernels write there as into any block, and no
hand-over, tier or cache of prefixes ever sees one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayk.kv.groups import KVCacheGroup

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StateScratch:
    """The scratch of one engine, the same on every rank. Made by `plan_scratch`."""

    first_block: int
    """The pool's ids end before it."""
    max_seqs: int
    num_tokens: int
    """States of a row in each group: those after the last known token and after all drafts but the last."""
    groups: tuple[int, ...]
    """KV groups of states."""

    @property
    def num_blocks(self) -> int:
        return self.max_seqs * self.num_tokens * len(self.groups)

    def blocks(self, group: int, rows: Ints, drafts: Ints) -> Ints:
        """Return the blocks, int64 [n], of states of `rows` [n] after so many `drafts` [n]."""
        assert np.all((drafts >= 0) & (drafts < self.num_tokens)), drafts
        place: Ints = (self.groups.index(group) * self.max_seqs + rows) * self.num_tokens + drafts
        return self.first_block + place


def plan_scratch(
    groups: Sequence[KVCacheGroup], *, num_blocks: int, max_seqs: int, num_drafts: int
) -> StateScratch | None:
    """Plan it behind a pool of `num_blocks`, for up to `num_drafts` tokens of a request; None without drafts
    or states."""
    states = tuple(g.index for g in groups if not g.spec.has_token_rows)
    if not states or not num_drafts:
        return None
    return StateScratch(num_blocks, max_seqs, num_drafts, states)
