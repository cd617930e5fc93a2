"""The decoder of every family: embedding, layers, final norm, output head; one rank's share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rayk.kernels.quantise import QuantisedKV
from rayk.kv.caches import OwnsCache
from rayk.kv.groups import CacheKey
from rayk.models.build import Build
from rayk.models.config import DecoderConfig
from rayk.models.layers.altup import AltUpLayer, AltUpStreams, build_altup_streams
from rayk.models.layers.attention import Attention
from rayk.models.layers.embedding import LmHead, VocabEmbedding, rounded_scale
from rayk.models.layers.layer import Layer, OneStream, ParallelLayer, build_layer
from rayk.models.layers.mla import Mla
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Placing
from rayk.parallel import shard


class Decoder:
    """One rank of a model. Every rank of the group calls forward and logits with equal inputs."""

    def __init__(
        self,
        *,
        config: DecoderConfig,
        embedding: VocabEmbedding,
        layers: tuple[Layer | ParallelLayer | AltUpLayer, ...],
        cache_owners: Mapping[CacheKey, OwnsCache],
        cache_readers: Sequence[tuple[CacheKey, OwnsCache]] = (),
        streams: OneStream | AltUpStreams,
        final_norm: Norm,
        lm_head: LmHead,
        placing: Placing,
        dtype: torch.dtype,
    ) -> None:
        """`cache_owners`: the mixers that own a cache, by (layer, part). `cache_readers`: mixers that use
        another layer's cache, with its key. `streams`: the residual stream between layers. `dtype`: the
        weights'."""
        self.config = config
        self.layers = layers
        self.cache_owners = dict(cache_owners)
        self.cache_readers = tuple(cache_readers)
        self.attention_layers: dict[int, Attention] = {
            layer: owner for (layer, _), owner in self.cache_owners.items() if isinstance(owner, Attention)
        }
        self.num_token_layers = 0
        """Tokens of the last `forward`, summed over the layers that computed them."""
        self._embedding = embedding
        self._streams: Any = streams
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._placing = placing
        self._dtype = dtype
        self._residual_dtype = torch.float32 if config.residual_wide else dtype

    @property
    def num_head_weights(self) -> int:
        """Elements of the rank's share of the output matrix."""
        return self._lm_head.weight.numel()

    @property
    def weight_itemsize(self) -> int:
        return self._dtype.itemsize

    @property
    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """Layer -> the scales (k, v) of its bound cache; empty if pages hold all scales."""
        caches = {
            layer: owner.kv_cache
            for (layer, _), owner in self.cache_owners.items()
            if isinstance(owner, Attention | Mla)
        }
        return {
            layer: (cache.k_scale, cache.v_scale)
            for layer, cache in caches.items()
            if isinstance(cache, QuantisedKV) and cache.kv_format.has_layer_scales
        }

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Mapping[CacheKey, Any],
        wanted: torch.Tensor | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm, the same on every rank.

        token_ids, positions: int64 [T], the requests' tokens one after the other, no padding. metadata:
        (layer, part) -> the metadata of the cache it uses for this step: an attention backend's, or the
        Segments of a recurrent state. wanted: int64 [M], ascending: the tokens whose hidden states are
        returned, [M, hidden]; the layers of `config.fast_prefill_layers` compute only these (and their
        metadata covers these). None: all tokens. on_layer: called with each layer once its work on these
        tokens is queued on the device; not for layers that do none.
        """
        places = self._placing.at(positions)
        x = self._streams.begin(token_ids, self._embedding.forward(token_ids).to(self._residual_dtype))
        self.num_token_layers = 0
        first_fast = len(self.layers) if wanted is None else self.config.fast_prefill_layers.start
        for index, layer in enumerate(self.layers):
            if index == first_fast:
                assert wanted is not None
                x, positions = self._streams.select(x, wanted), positions[wanted]
                if not len(wanted):
                    break
                places = self._placing.at(positions)
            self.num_token_layers += len(positions)
            x = layer.forward(x, places[index], self._metadata_of(index, metadata))
            if on_layer is not None:
                on_layer(index)
        return self._final_norm.forward(self._streams.end(x)).to(self._dtype)

    def _metadata_of(self, layer: int, metadata: Mapping[CacheKey, Any]) -> Any:
        """Return the metadata of its only cache, a mapping by part if it has two, None if it has none."""
        parts = self.config.layers[layer].mixer_parts
        if len(parts) > 1:
            return {part: metadata[layer, part] for part in parts}
        return metadata[layer, parts[0]] if parts else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> float32 [R, vocab] on every rank."""
        return self._lm_head.forward(hidden)


def build_decoder(build: Build) -> Decoder:
    config, pieces, names = build.config, build.pieces, build.pieces.names
    vocab_rows = shard.shard_range(config.vocab_size, *build.tp)
    vocab = (config.vocab_size, config.hidden_size)
    embedding = pieces.rows(names.embedding, vocab, vocab_rows)
    scale = config.embedding_scale
    if config.embedding_scale_rounded:
        scale = rounded_scale(scale, pieces.dtype)
    tied = config.tie_embeddings
    built = [build_layer(build, index) for index in range(config.num_layers)]
    return Decoder(
        config=config,
        embedding=VocabEmbedding(embedding, vocab_rows, build.comm, scale=scale),
        layers=tuple(layer for layer, _ in built),
        cache_owners={
            (index, part): user
            for index, (layer, (_, users)) in enumerate(zip(config.layers, built, strict=True))
            for part, user in users.items()
            if layer.kv_source is None
        },
        cache_readers=[
            ((layer.kv_source, part), user)
            for layer, (_, users) in zip(config.layers, built, strict=True)
            for part, user in users.items()
            if layer.kv_source is not None
        ],
        streams=OneStream() if config.altup is None else build_altup_streams(build, config.altup),
        final_norm=build.norm(names.final_norm),
        lm_head=LmHead(
            embedding if tied else pieces.rows(names.lm_head, vocab, vocab_rows),
            config.vocab_size,
            build.comm,
            tied=tied,
            scale=config.logit_scale,
            soft_cap=config.final_soft_cap,
        ),
        placing=Placing(config.layers, dtype=pieces.dtype, device=pieces.device),
        dtype=pieces.dtype,
    )
