"""Multi-token prediction layers: each takes a token's embedding and the hidden state before it, both normed
and projected to one (arXiv 2412.19437, section 2.2; transformers/modeling_layers.py:325).

Embedding and output head are the model's, also where a release stores copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayk.kv.caches import OwnsCache
from rayk.kv.groups import CacheKey
from rayk.models.build import Build
from rayk.models.decoder import Decoder
from rayk.models.drafters.config import DrafterConfig
from rayk.models.layers.layer import Layer, build_layer
from rayk.models.layers.linear import Linear
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Placing
from rayk.models.pieces import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpLayer:
    """One depth."""

    key: CacheKey
    embedding_norm: Norm
    hidden_norm: Norm
    join: Linear
    """[normed embedding, normed hidden state] -> hidden, whole on every rank."""
    block: Layer
    output_norm: Norm


class Mtp:
    """Drafts as RankDrafter says. What `forward` returns is normed: logits and the next depth take it as it
    is, as they take the model's own hidden states."""

    def __init__(
        self,
        config: DrafterConfig,
        layers: Sequence[MtpLayer],
        cache_owners: Mapping[CacheKey, OwnsCache],
        target: Decoder,
        placing: Placing,
    ) -> None:
        self.config = config
        self.cache_owners = dict(cache_owners)
        self._layers = tuple(layers)
        self._target = target
        self._placing = placing

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the model's final norm gave, as it is."""
        return hidden

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        metadata: Mapping[CacheKey, Any],
        depth: int = 0,
    ) -> torch.Tensor:
        assert hidden is not None
        layer = self._layers[depth]
        embedded = layer.embedding_norm.forward(self._target.embedding.look_up(token_ids))
        x = layer.join.forward(torch.cat([embedded, layer.hidden_norm.forward(hidden)], dim=-1))
        x = layer.block.forward(x, self._placing.at(positions)[depth], metadata[layer.key])
        return layer.output_norm.forward(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target.logits(hidden)


def build_mtp(build: Build, config: DrafterConfig, target: Decoder) -> Mtp:
    """Build the layers that `build` reads; it counts them from 0."""
    size = config.decoder.hidden_size
    layers: list[MtpLayer] = []
    owners: dict[CacheKey, OwnsCache] = {}
    for index in range(config.decoder.num_layers):
        built = build_layer(build, index)
        assert isinstance(built.layer, Layer), built.layer
        ((part, owner),) = built.users.items()
        key = config.first_layer + index, part
        owners[key] = owner
        layers.append(
            MtpLayer(
                key=key,
                embedding_norm=build.layer_norm(index, "embedding_norm"),
                hidden_norm=build.layer_norm(index, "hidden_norm"),
                join=build.linear(index, (Rows.whole("join", size),), bias=False, num_inputs=2 * size),
                block=built.layer,
                output_norm=build.layer_norm(index, "output_norm"),
            )
        )
    pieces = build.pieces
    placing = Placing(config.decoder.layers, dtype=pieces.dtype, device=pieces.device)
    return Mtp(config, layers, owners, target, placing)
