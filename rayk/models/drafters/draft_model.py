"""A smaller model as drafter: rows are those of the model's own tokens, and hidden states stay its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rayk.kv.groups import CacheKey
from rayk.models.decoder import Decoder
from rayk.models.drafters.config import DrafterConfig


class DraftModel:
    """Drafts with a whole decoder of its own, as RankDrafter says."""

    def __init__(self, config: DrafterConfig, decoder: Decoder) -> None:
        self.config = config
        self._decoder = decoder
        first = config.first_layer
        self.cache_owners = {
            (first + layer, part): owner for (layer, part), owner in decoder.cache_owners.items()
        }

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a smaller model takes nothing of the model")

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        metadata: Mapping[CacheKey, Any],
        depth: int = 0,
    ) -> torch.Tensor:
        """[T, hidden] after the final norm; `hidden` is None."""
        assert hidden is None, "a smaller model takes nothing of the model"
        assert depth == 0, depth
        first = self.config.first_layer
        own = {(layer, part): metadata[first + layer, part] for layer, part in self._decoder.cache_owners}
        return self._decoder.forward(token_ids, positions, own)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden)
