"""What an engine calls of a drafter.

Shapes: T packed rows of the requests, one after the other; hidden: elements of a drafter's hidden state; V
the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from rayk.kv.caches import OwnsCache
from rayk.kv.groups import CacheKey
from rayk.models.drafters.config import DrafterConfig


class RankDrafter(Protocol):
    """One rank's share. All ranks of the engine call each method in the same order, with equal arguments, and
    get the same bits.

    To propose after token n of a request (all up to n known): one `forward` of depth 0 over the rows that the
    drafter has not had yet, up to row n - 1 (a smaller model: up to row n), from what `combine` makes of the
    model's hidden states; the last row's `logits` give the first proposal. For the next one, either depth 0
    takes one more row, of the proposal and the hidden state that gave it; or, of a drafter with several
    `depths`, depth d takes the rows of depth d - 1, each with the token after its own. Rows whose tokens are
    taken back are overwritten by later ones at the same positions.
    """

    @property
    def config(self) -> DrafterConfig: ...

    @property
    def cache_owners(self) -> Mapping[CacheKey, OwnsCache]:
        """(layer's number in the engine, part) -> what binds its cache."""
        ...

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Make of what the model computed what `forward` takes: [T, hidden] of the final norm for mtp,
        `Decoder.tapped` for eagle3 -> [T, hidden]. Not of a smaller model, which takes nothing."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        metadata: Mapping[CacheKey, Any],
        depth: int = 0,
    ) -> torch.Tensor:
        """Compute rows and store their keys and values: [T, hidden], which the next proposal's row takes.

        token_ids: int64 [T], of each row the token after its position (a smaller model: at it). positions:
        int64 [T], of the rows. hidden: [T, hidden], None for a smaller model. metadata: by the keys of
        `cache_owners` that the depth's layers have, as of Decoder.forward.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` returned of R rows -> float32 [R, V]; minus infinity for a token that the drafter
        cannot propose."""
        ...
