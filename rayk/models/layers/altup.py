"""Alternating updates (AltUp): a residual stream that is several, of which each layer computes one; and
per-layer embeddings: what each token adds behind each layer, from a row of its id and its embedding.

Shapes: S streams, T packed tokens, L layers, P elements of a per-layer input. All of it is on every rank, but
for the table of per-layer embeddings, which is split by token id. Source: gemma3n/modeling_gemma3n.py of
transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rayk.kernels.pointwise import activate

if TYPE_CHECKING:
    from rayk.models.decoder import Mixer, Mlp
    from rayk.models.layers.embedding import VocabEmbedding
    from rayk.models.layers.linear import Linear
    from rayk.models.layers.norm import Norm
    from rayk.models.layers.places import Places

_MIN_SQUARE = 1e-5
"""What a projected stream's mean square counts as at least, when it is given the first one's size."""


class AltUp:
    """Predicts every stream from all of them, and mends the predictions by what the active one became."""

    def __init__(
        self,
        *,
        active: int,
        router_norm: Norm,
        router_scale: float,
        router: Linear,
        predictor: Linear,
        corrector: Linear,
    ) -> None:
        """`active`: the stream that a layer computes. router [S, hidden] of a stream normed and scaled;
        predictor [S * S, S], whose row (to, from) weighs stream `from` in the prediction of stream `to`;
        corrector [S, S]."""
        self._active = active
        self._router_scale = router_scale
        self._router_norm = router_norm
        self._router = router
        self._predictor = predictor
        self._corrector = corrector

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """[S, T, hidden] -> the same, each with a weighted sum of all added."""
        num_streams = streams.shape[0]
        weights = self._predictor.forward(self._modalities(streams[self._active]))
        weights = weights.view(-1, num_streams, num_streams)
        return streams + torch.matmul(weights, streams.transpose(0, 1)).transpose(0, 1)

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """predicted [S, T, hidden] and what the active stream became, [T, hidden] -> [S, T, hidden]."""
        weights = self._corrector.forward(self._modalities(computed)) + 1.0
        return predicted + (computed - predicted[self._active]) * weights.t()[:, :, None]

    def _modalities(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, S]."""
        routed = self._router.forward(self._router_norm.forward(x) * self._router_scale)
        return torch.tanh(routed.float()).to(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Laurel:
    """A learned residual of low rank: x + norm(right left x)."""

    left: Linear
    right: Linear
    norm: Norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return x + self.norm.forward(self.right.forward(self.left.forward(x)))


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpLayer:
    """A layer with four norms around mixer and feed-forward half, for the active one of several streams."""

    active: int
    altup: AltUp
    laurel: Laurel
    input_norm: Norm
    mixer: Mixer
    post_mixer_norm: Norm
    mlp_norm: Norm
    mlp: Mlp
    post_mlp_norm: Norm

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[S, T, hidden] -> [S, T, hidden]. `metadata` is the mixer's."""
        predicted = self.altup.predict(x)
        active = predicted[self.active]
        normed = self.input_norm.forward(active)
        mixed = self.post_mixer_norm.forward(self.mixer.forward(normed, places, metadata))
        out = (active + mixed + self.laurel.forward(normed)) / math.sqrt(2)
        out = out + self.post_mlp_norm.forward(self.mlp.forward(self.mlp_norm.forward(out)))
        return self.altup.correct(predicted, out)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerInput:
    """What a layer's per-layer input adds behind it, to all streams but the first."""

    active: int
    scale: torch.Tensor | None
    """[hidden], on the active stream before it gates; None: there is none."""
    gate: Linear
    activation: str
    out: Linear
    norm: Norm

    def forward(self, streams: torch.Tensor, per_layer_input: torch.Tensor) -> torch.Tensor:
        """streams [S, T, hidden], in place, and per_layer_input [T, P] -> [S, T, hidden]."""
        active = streams[self.active]
        gate = self.gate.forward(active if self.scale is None else active * self.scale)
        gated = activate(gate, self.activation) * per_layer_input
        streams[1:] += self.norm.forward(self.out.forward(gated))
        return streams


class Streams:
    """What stands around the layers: the streams' begin and end, and per-layer inputs."""

    def __init__(
        self,
        *,
        spread: tuple[Linear, ...],
        merge: tuple[Linear, ...],
        table: VocabEmbedding,
        table_size: int,
        projection: Linear,
        projection_scale: float,
        projection_norm: Norm,
        sum_scale: float,
        inputs: tuple[PerLayerInput, ...],
    ) -> None:
        """`spread`, `merge`: of streams 1 and up, from and to the first. `table` [table_size, L * P] is
        looked up by token id, ids beyond it reading row 0; `projection` [L * P, hidden] of the embedding,
        scaled and normed, joins that, and `sum_scale` is on the sum. `inputs`: by layer."""
        assert len(spread) == len(merge)
        self._spread = spread
        self._merge = merge
        self._table = table
        self._table_size = table_size
        self._projection = projection
        self._projection_scale = projection_scale
        self._projection_norm = projection_norm
        self._sum_scale = sum_scale
        self._inputs = inputs

    def begin(self, token_ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [T] and their embeddings [T, hidden] -> streams [S, T, hidden] and per-layer inputs
        [L, T, P]."""
        others = (_of_size(linear.forward(x), x) for linear in self._spread)
        return torch.stack([x, *others]), self._per_layer_inputs(token_ids, x)

    def after_layer(self, layer: int, streams: torch.Tensor, per_layer_inputs: torch.Tensor) -> torch.Tensor:
        """What a layer made of the streams [S, T, hidden], in place, and per-layer inputs [L, T, P]
        -> [S, T, hidden]."""
        return self._inputs[layer].forward(streams, per_layer_inputs[layer])

    def end(self, streams: torch.Tensor) -> torch.Tensor:
        """[S, T, hidden] -> [T, hidden]."""
        first = streams[0]
        others = (
            _of_size(linear.forward(stream), first)
            for linear, stream in zip(self._merge, streams[1:], strict=True)
        )
        return torch.stack([first, *others]).mean(0)

    def _per_layer_inputs(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shape = (len(x), len(self._inputs), -1)
        projected = self._projection.forward(x) * self._projection_scale
        projected = self._projection_norm.forward(projected.view(shape))
        rows = self._table.forward(token_ids.where(token_ids < self._table_size, 0))
        return ((projected + rows.view(shape)) * self._sum_scale).transpose(0, 1)


def _of_size(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x [T, hidden] with the root mean square of `like`, token by token."""
    target = like.square().mean(-1, keepdim=True).sqrt()
    square = x.square().mean(-1, keepdim=True)
    return x * target / square.clamp(min=_MIN_SQUARE).sqrt()
