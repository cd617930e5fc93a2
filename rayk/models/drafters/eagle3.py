"""An EAGLE-3 head: a llama layer whose attention takes embedding and hidden state side by side.

arXiv 2503.01840; vllm/model_executor/models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rayk.kv.caches import OwnsCache
from rayk.kv.groups import CacheKey
from rayk.models.build import Build
from rayk.models.config import MlpConfig
from rayk.models.drafters.config import DrafterConfig
from rayk.models.drafters.reading import read_target_ids
from rayk.models.layers.attention import Attention, build_attention
from rayk.models.layers.embedding import LmHead, VocabEmbedding
from rayk.models.layers.linear import Linear
from rayk.models.layers.mlp import Mlp, build_mlp
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Placing
from rayk.parallel import shard


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadWeights:
    fuse: Linear
    """The model's three hidden states, side by side -> hidden, whole on every rank."""
    embedding: VocabEmbedding
    """The head's own, or the model's."""
    embedding_norm: Norm
    hidden_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    norm: Norm
    lm_head: LmHead
    """-> the tokens that the head can propose."""
    target_ids: torch.Tensor | None
    """int64 [draft vocabulary]: the model's ids of these tokens; None: the same ids."""


class Eagle3:
    """Drafts as RankDrafter says. What `forward` returns is the residual stream, which the next row takes in
    place of the model's hidden states; `logits` norm it."""

    def __init__(self, config: DrafterConfig, weights: HeadWeights, placing: Placing) -> None:
        assert config.eagle3 is not None
        self.config = config
        self._key: CacheKey = config.first_layer, "attention"
        self.cache_owners: dict[CacheKey, OwnsCache] = {self._key: weights.attention}
        self._weights = weights
        self._placing = placing
        self._norm_before_residual = config.eagle3.norm_before_residual

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, 3 * the model's hidden size] -> [T, hidden]."""
        return self._weights.fuse.forward(hidden)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        metadata: Mapping[CacheKey, Any],
        depth: int = 0,
    ) -> torch.Tensor:
        assert hidden is not None
        assert depth == 0, depth
        w = self._weights
        embedded = w.embedding_norm.forward(w.embedding.look_up(token_ids))
        normed = w.hidden_norm.forward(hidden)
        (places,) = self._placing.at(positions)
        mixed = w.attention.forward(torch.cat([embedded, normed], dim=-1), places, metadata[self._key])
        x, inner = w.mlp_norm.add(normed if self._norm_before_residual else hidden, mixed)
        return x + w.mlp.forward(inner)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._weights.lm_head.forward(self._weights.norm.forward(hidden))
        ids = self._weights.target_ids
        if ids is None:
            return found
        spread = found.new_full((len(found), self.config.decoder.vocab_size), -torch.inf)
        return spread.index_copy_(1, ids, found)


def build_eagle3(build: Build, config: DrafterConfig, target_embedding: VocabEmbedding) -> Eagle3:
    """Build the head that `build` reads, around the model's embedding if it has none of its own."""
    head, decoder, pieces, names = config.eagle3, config.decoder, build.pieces, build.pieces.names
    assert head is not None
    size, taken = decoder.hidden_size, len(config.taps) * config.target_hidden_size
    attends = replace(build, attention_input_size=2 * size)
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, MlpConfig), mlp
    vocab_rows = shard.shard_range(head.draft_vocab_size, *build.tp)
    fuse = names.around["fuse"]
    weights = HeadWeights(
        fuse=Linear(pieces.columns(fuse, (size, taken), (range(taken),)), None),
        embedding=_embedding(build, target_embedding),
        embedding_norm=build.layer_norm(0, "input_norm"),
        hidden_norm=build.layer_norm(0, "hidden_norm"),
        attention=build_attention(attends, 0),
        mlp_norm=build.layer_norm(0, "mlp_norm"),
        mlp=build_mlp(build, 0, mlp),
        norm=build.norm(names.final_norm),
        lm_head=LmHead(
            pieces.rows(names.lm_head, (head.draft_vocab_size, size), vocab_rows),
            head.draft_vocab_size,
            build.comm,
        ),
        target_ids=read_target_ids(pieces, head.draft_vocab_size, decoder.vocab_size),
    )
    placing = Placing(decoder.layers, dtype=pieces.dtype, device=pieces.device)
    return Eagle3(config, weights, placing)


def _embedding(build: Build, target_embedding: VocabEmbedding) -> VocabEmbedding:
    name, decoder = build.pieces.names.embedding, build.config
    shape = decoder.vocab_size, decoder.hidden_size
    width = target_embedding.weight.shape[1]
    if build.pieces.reader.shape_of(name) is None and width == decoder.hidden_size:
        return target_embedding
    rows = shard.shard_range(decoder.vocab_size, *build.tp)
    return VocabEmbedding(build.pieces.rows(name, shape, rows), rows, build.comm)
