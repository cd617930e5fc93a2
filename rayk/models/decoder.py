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
    from rayk.models.layers.norm import RMSNorm
    from rayk.models.layers.rope import Rotary, Rotation


class Mixer(Protocol):
    """What mixes tokens in a layer: attention, or a state-space mixer."""

    def forward(self, x: torch.Tensor, rotation: Rotation | None, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank."""
        ...


class Mlp(Protocol):
    """The feed-forward half of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    input_norm: RMSNorm
    mixer: Mixer
    mlp_norm: RMSNorm
    mlp: Mlp
    rope: RopeConfig | None

    def forward(self, x: torch.Tensor, rotation: Rotation | None, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        x = x + self.mixer.forward(self.input_norm.forward(x), rotation, metadata)
        return x + self.mlp.forward(self.mlp_norm.forward(x))


class Decoder:
    """One rank of a model. Every rank of the group calls forward and logits with equal inputs."""

    def __init__(
        self,
        *,
        config: DecoderConfig,
        embedding: VocabEmbedding,
        layers: tuple[Layer, ...],
        final_norm: RMSNorm,
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
