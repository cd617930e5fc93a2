"""The decoder of every family: embedding, layers, final norm, output head; one rank's share.

With pipeline parallel a rank has the layers of its stage. The first stage has the embedding, the last one the
final norm and the head; the residual stream crosses their borders as `pack` lists it.
"""

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
        embedding: VocabEmbedding | None,
        stage: range,
        layers: tuple[Layer | ParallelLayer | AltUpLayer, ...],
        cache_owners: Mapping[CacheKey, OwnsCache],
        cache_readers: Sequence[tuple[CacheKey, OwnsCache]] = (),
        streams: OneStream | AltUpStreams,
        final_norm: Norm | None,
        lm_head: LmHead | None,
        placing: Placing,
        dtype: torch.dtype,
    ) -> None:
        """`stage`: which of the model's layers `layers` are. `embedding`: None but on the first stage;
        `final_norm` and `lm_head`: None but on the last. `cache_owners`: the mixers that own a cache, by
        (layer, part). `cache_readers`: mixers that use another layer's cache, with its key. `streams`: the
        residual stream between layers. `dtype`: the weights'."""
        assert len(layers) == len(stage), (len(layers), stage)
        self.config = config
        self.stage = stage
        self.layers = layers
        self.cache_owners = dict(cache_owners)
        self.cache_readers = tuple(cache_readers)
        self.attention_layers: dict[int, Attention] = {
            layer: owner for (layer, _), owner in self.cache_owners.items() if isinstance(owner, Attention)
        }
        self.num_token_layers = 0
        """Tokens of the last `forward`, summed over the layers that computed them."""
        self.taps: tuple[int, ...] = ()
        """Layers, `num_layers` for the end: `forward` keeps the residual stream before each in `tapped`, for
        a drafter. Only of a model in one stage, with one stream."""
        self.tapped: torch.Tensor | None = None
        """[T, len(taps) * hidden] of the last `forward`, in the weights' dtype, by `taps`' order."""
        self._embedding = embedding
        self._streams: Any = streams
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._placing = placing
        self._dtype = dtype
        self.residual_dtype = torch.float32 if config.residual_wide else dtype

    @property
    def num_head_weights(self) -> int:
        """Elements of the rank's share of the output matrix, 0 where it has none."""
        return 0 if self._lm_head is None else self._lm_head.weight.numel()

    @property
    def embedding(self) -> VocabEmbedding:
        """The token embedding, of the first stage."""
        assert self._embedding is not None, "on the first stage"
        return self._embedding

    @property
    def lm_head(self) -> LmHead:
        """The output head, of the last stage."""
        assert self._lm_head is not None, "on the last stage"
        return self._lm_head

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

    def layer(self, index: int) -> Layer | ParallelLayer | AltUpLayer:
        """Return a layer of the stage by the model's index."""
        return self.layers[self.stage.index(index)]

    @property
    def is_first(self) -> bool:
        return self.stage.start == 0

    @property
    def is_last(self) -> bool:
        return self.stage.stop == self.config.num_layers

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Mapping[CacheKey, Any],
        wanted: torch.Tensor | None = None,
        on_layer: Callable[[int], None] | None = None,
        received: tuple[torch.Tensor, ...] = (),
    ) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm, the same on every rank of the last stage.

        Arguments are those of `pass_on`; wanted: int64 [M]: the tokens whose hidden states are returned,
        [M, hidden].
        """
        assert self._final_norm is not None, "on the last stage"
        x = self._through(token_ids, positions, metadata, wanted, on_layer, received)
        return self._final_norm.forward(self._streams.end(x)).to(self._dtype)

    def pass_on(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Mapping[CacheKey, Any],
        wanted: torch.Tensor | None = None,
        on_layer: Callable[[int], None] | None = None,
        received: tuple[torch.Tensor, ...] = (),
    ) -> tuple[torch.Tensor, ...]:
        """Compute the stage's layers, of a stage that is not the last. Returns the tensors that the next
        stage receives, the same on every rank of the stage.

        token_ids, positions: int64 [T], the requests' tokens one after the other, no padding. metadata:
        (layer, part) -> the metadata of the cache it uses for this step: an attention backend's, or the
        Segments of a recurrent state. wanted: int64 [M], ascending: the tokens whose hidden states the last
        stage returns; the layers of `config.fast_prefill_layers` compute only these (and their metadata
        covers these). None: all tokens. on_layer: called with each layer once its work on these tokens is
        queued on the device; not for layers that do none. received: what the stage before returned; empty on
        the first.
        """
        x = self._through(token_ids, positions, metadata, wanted, on_layer, received)
        packed: tuple[torch.Tensor, ...] = self._streams.pack(x)
        return packed

    def _through(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Mapping[CacheKey, Any],
        wanted: torch.Tensor | None,
        on_layer: Callable[[int], None] | None,
        received: tuple[torch.Tensor, ...],
    ) -> Any:
        """Take the residual stream through the stage's layers."""
        first_fast = self.config.num_layers if wanted is None else self.config.fast_prefill_layers.start
        if self.is_first:
            assert self._embedding is not None
            embeddings = self._embedding.forward(token_ids).to(self.residual_dtype)
            x = self._streams.begin(token_ids, embeddings)
        else:
            x = self._streams.unpack(received)
            if self.stage.start > first_fast:
                assert wanted is not None
                positions = positions[wanted]
        places = self._placing.at(positions)
        self.num_token_layers = 0
        streams: dict[int, torch.Tensor] = {}
        for index, layer in zip(self.stage, self.layers, strict=True):
            if index in self.taps:
                streams[index] = x
            if index == first_fast:
                assert wanted is not None
                x, positions = self._streams.select(x, wanted), positions[wanted]
                places = self._placing.at(positions)
            if not len(positions):
                break
            self.num_token_layers += len(positions)
            x = layer.forward(x, places[index], self._metadata_of(index, metadata))
            if on_layer is not None:
                on_layer(index)
        if self.taps:
            self._keep_tapped({**streams, self.config.num_layers: x})
        return x

    def _keep_tapped(self, streams: Mapping[int, torch.Tensor]) -> None:
        """Keep the streams [T, hidden] before the tapped layers."""
        assert self.is_first, "of a model in one stage"
        assert self.is_last, "of a model in one stage"
        self.tapped = torch.cat([streams[index].to(self._dtype) for index in self.taps], dim=-1)

    def received_shapes(self, num_tokens: int, num_wanted: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Shapes of `received`, for T tokens of which M are `wanted` (None: all); their dtype is
        `residual_dtype`. Empty on the first stage."""
        if self.is_first:
            return ()
        is_behind = num_wanted is not None and self.stage.start > self.config.fast_prefill_layers.start
        num_rows = num_wanted if is_behind and num_wanted is not None else num_tokens
        return tuple(self._streams.packed_shapes(num_rows, self.config.hidden_size))

    def _metadata_of(self, layer: int, metadata: Mapping[CacheKey, Any]) -> Any:
        """Return the metadata of its only cache, a mapping by part if it has two, None if it has none."""
        parts = self.config.layers[layer].mixer_parts
        if len(parts) > 1:
            return {part: metadata[layer, part] for part in parts}
        return metadata[layer, parts[0]] if parts else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> float32 [R, vocab] on every rank of the last stage."""
        return self.lm_head.forward(hidden)


def build_decoder(build: Build) -> Decoder:
    config, pieces, names = build.config, build.pieces, build.pieces.names
    vocab_rows = shard.shard_range(config.vocab_size, *build.tp)
    vocab = (config.vocab_size, config.hidden_size)
    scale = config.embedding_scale
    if config.embedding_scale_rounded:
        scale = rounded_scale(scale, pieces.dtype)
    tied = config.tie_embeddings
    # Where the model ties them, first and last stage each read the embedding.
    needs_embedding = build.is_first or (build.is_last and tied)
    embedding = pieces.rows(names.embedding, vocab, vocab_rows) if needs_embedding else None
    built = {index: build_layer(build, index) for index in build.layers}
    lm_head = None
    if build.is_last:
        weight = embedding if tied else pieces.rows(names.lm_head, vocab, vocab_rows)
        assert weight is not None
        lm_head = LmHead(
            weight,
            config.vocab_size,
            build.comm,
            tied=tied,
            scale=config.logit_scale,
            soft_cap=config.final_soft_cap,
        )
    return Decoder(
        config=config,
        embedding=VocabEmbedding(embedding, vocab_rows, build.comm, scale=scale)
        if build.is_first and embedding is not None
        else None,
        stage=build.layers,
        layers=tuple(layer for layer, _ in built.values()),
        cache_owners={
            (index, part): user
            for index, (_, users) in built.items()
            for part, user in users.items()
            if config.layers[index].kv_source is None
        },
        cache_readers=[
            ((source, part), user)
            for index, (_, users) in built.items()
            for part, user in users.items()
            if (source := config.layers[index].kv_source) is not None
        ],
        streams=OneStream() if config.altup is None else build_altup_streams(build, config.altup),
        final_norm=build.norm(names.final_norm) if build.is_last else None,
        lm_head=lm_head,
        placing=Placing(config.layers, dtype=pieces.dtype, device=pieces.device),
        dtype=pieces.dtype,
    )
