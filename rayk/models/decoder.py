"""The decoder of every family: embedding, layers, final norm, output head; one rank's share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rayk.models.layers.attention import Attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rayk.models.config import DecoderConfig, RopeConfig
    from rayk.models.layers.embedding import LmHead, VocabEmbedding
    from rayk.models.layers.norm import Norm
    from rayk.models.layers.rope import Rotary, Rotation
    from rayk.parallel.comm import Comm


class Mixer(Protocol):
    """What mixes tokens in a layer: attention, or a state-space mixer."""

    def forward(self, x: torch.Tensor, rotation: Rotation | None, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank; partial sums in a ParallelLayer."""
        ...


class Mlp(Protocol):
    """The feed-forward half of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank; partial sums in a ParallelLayer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """x + mixer(norm(x)), then x + mlp(norm(x)); each half normed once more where there are such norms."""

    input_norm: Norm
    mixer: Mixer
    post_mixer_norm: Norm | None
    mlp_norm: Norm
    mlp: Mlp
    post_mlp_norm: Norm | None
    rope: RopeConfig | None

    def forward(self, x: torch.Tensor, rotation: Rotation | None, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        mixed = self.mixer.forward(self.input_norm.forward(x), rotation, metadata)
        x = x + (mixed if self.post_mixer_norm is None else self.post_mixer_norm.forward(mixed))
        out = self.mlp.forward(self.mlp_norm.forward(x))
        return x + (out if self.post_mlp_norm is None else self.post_mlp_norm.forward(out))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayer:
    """x + mixer(n) + mlp(n), where n = norm(x); the halves' partial sums are added in one go."""

    input_norm: Norm
    mixer: Mixer
    mlp: Mlp
    rope: RopeConfig | None
    comm: Comm

    def forward(self, x: torch.Tensor, rotation: Rotation | None, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        normed = self.input_norm.forward(x)
        out = self.mixer.forward(normed, rotation, metadata) + self.mlp.forward(normed)
        return x + (self.comm.all_reduce(out) if self.comm.size > 1 else out)


class Decoder:
    """One rank of a model. Every rank of the group calls forward and logits with equal inputs."""

    def __init__(
        self,
        *,
        config: DecoderConfig,
        embedding: VocabEmbedding,
        layers: tuple[Layer | ParallelLayer, ...],
        final_norm: Norm,
        lm_head: LmHead,
        rotaries: tuple[Rotary, ...],
    ) -> None:
        self.config = config
        self.layers = layers
        self.attention_layers: dict[int, Attention] = {
            i: layer.mixer for i, layer in enumerate(layers) if isinstance(layer.mixer, Attention)
        }
        self._embedding = embedding
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._rotaries = rotaries

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Mapping[int, Any],
    ) -> torch.Tensor:
        """Hidden states [T, hidden] after the final norm, the same on every rank.

        token_ids, positions: int64 [T], the requests' tokens one after the other, no padding.
        metadata: layer index -> what that layer's attention backend built for this step.
        """
        # One rotation per distinct rope, not per layer.
        rotations = {rotary.config: rotary.at(positions) for rotary in self._rotaries}
        x = self._embedding.forward(token_ids)
        for index, layer in enumerate(self.layers):
            rotation = None if layer.rope is None else rotations[layer.rope]
            x = layer.forward(x, rotation, metadata.get(index))
        return self._final_norm.forward(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> float32 [R, vocab] on every rank."""
        return self._lm_head.forward(hidden)
