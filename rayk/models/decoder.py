"""The decoder of every family: embedding, layers, final norm, output head; one rank's share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rayk.kernels.quantise import QuantisedKV
from rayk.models.layers.attention import Attention
from rayk.models.layers.mla import Mla

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rayk.kv.caches import OwnsCache
    from rayk.kv.groups import CacheKey
    from rayk.models.config import DecoderConfig
    from rayk.models.layers.altup import AltUpLayer, Streams
    from rayk.models.layers.embedding import LmHead, VocabEmbedding
    from rayk.models.layers.norm import Norm
    from rayk.models.layers.places import Places, Placing
    from rayk.parallel.comm import Comm


class Mixer(Protocol):
    """What mixes tokens in a layer: attention, a recurrent mixer, or both side by side."""

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank; partial sums in a ParallelLayer."""
        ...


class Mlp(Protocol):
    """The feed-forward half of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank; partial sums in a ParallelLayer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """x + mixer(norm(x)), then x + mlp(norm(x)); each half normed once more where there are such norms.

    A layer may have one half only: then the other's norms are None too.
    """

    input_norm: Norm | None
    mixer: Mixer | None
    post_mixer_norm: Norm | None = None
    mlp_norm: Norm | None
    mlp: Mlp | None
    post_mlp_norm: Norm | None = None
    residual_multiplier: float = 1.0
    """On what each half adds."""
    dtype: torch.dtype | None = None
    """What the halves compute in where x is wider; None: as x is."""

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. `metadata` is the mixer's."""
        if self.mixer is not None:
            assert self.input_norm is not None
            mixed = self.mixer.forward(self._normed(self.input_norm, x), places, metadata)
            x = self._added(x, mixed, self.post_mixer_norm)
        if self.mlp is not None:
            assert self.mlp_norm is not None
            x = self._added(x, self.mlp.forward(self._normed(self.mlp_norm, x)), self.post_mlp_norm)
        return x

    def _normed(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        return norm.forward(x if self.dtype is None else x.to(self.dtype))

    def _added(self, x: torch.Tensor, out: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None:
            out = norm.forward(out)
        return x + (out if self.residual_multiplier == 1.0 else out * self.residual_multiplier)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayer:
    """x + mixer(n) + mlp(n), where n = norm(x); the halves' partial sums are added in one go."""

    input_norm: Norm
    mixer: Mixer
    mlp: Mlp
    comm: Comm

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        normed = self.input_norm.forward(x)
        out = self.mixer.forward(normed, places, metadata) + self.mlp.forward(normed)
        return x + (self.comm.all_reduce(out) if self.comm.size > 1 else out)


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
        streams: Streams | None = None,
        final_norm: Norm,
        lm_head: LmHead,
        placing: Placing,
        dtype: torch.dtype,
    ) -> None:
        """`cache_owners`: the mixers of `layers` that keep something, by (layer, part). `cache_readers`:
        those that use another's, by its key. `streams`: around AltUpLayers. `dtype`: the weights'."""
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
        self._streams = streams
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
        """Bytes of a weight."""
        return self._dtype.itemsize

    @property
    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """Layer -> the scales (k, v) of its bound cache; empty where pages hold all that is needed."""
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

        token_ids, positions: int64 [T], the requests' tokens one after the other, no padding.
        metadata: (layer, part) -> what was built for the cache it uses and this step: an attention backend's,
        or the Segments of a recurrent state.
        wanted: int64 [M], ascending: the tokens whose hidden states are returned, [M, hidden]. The layers of
        `config.fast_prefill_layers` compute only these (their metadata is of these), none of them if M = 0.
        None: all tokens everywhere.
        on_layer: told of each layer when all that it does for these tokens is queued on the device; not of
        layers that compute none of them.
        """
        places = self._placing.at(positions)
        x = self._embedding.forward(token_ids).to(self._residual_dtype)
        streams, per_layer_inputs = self._streams, None
        if streams is not None:
            x, per_layer_inputs = streams.begin(token_ids, x)
        self.num_token_layers = 0
        first_fast = len(self.layers) if wanted is None else self.config.fast_prefill_layers.start
        for index, layer in enumerate(self.layers):
            if index == first_fast:
                assert wanted is not None
                x = x.index_select(-2, wanted)
                per_layer_inputs = (
                    None if per_layer_inputs is None else per_layer_inputs.index_select(-2, wanted)
                )
                if not len(wanted):
                    break
                places = self._placing.at(positions[wanted])
            self.num_token_layers += x.shape[-2]
            x = layer.forward(x, places[index], self._metadata_of(index, metadata))
            if on_layer is not None:
                on_layer(index)
            if streams is not None and per_layer_inputs is not None:
                x = streams.after_layer(index, x, per_layer_inputs)
        if streams is not None:
            x = streams.end(x)
        return self._final_norm.forward(x).to(self._dtype)

    def _metadata_of(self, layer: int, metadata: Mapping[CacheKey, Any]) -> Any:
        """What its mixer takes: that of its only cache, or by part where it has two; None without any."""
        parts = self.config.layers[layer].mixer_parts
        if len(parts) > 1:
            return {part: metadata[layer, part] for part in parts}
        return metadata[layer, parts[0]] if parts else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> float32 [R, vocab] on every rank."""
        return self._lm_head.forward(hidden)
