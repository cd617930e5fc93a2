"""Alternating updates (AltUp): a residual stream of several, of which each layer computes one; and per-layer
embeddings: an input to the end of each layer, from a table by token id and from the token's embedding.

Shapes: S streams, T packed tokens, L layers, P elements of a per-layer input. Every rank holds everything
except the table, which is split by token id. Source: gemma3n/modeling_gemma3n.py of transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rayk.kernels.altup import StreamRouter, correct_streams, predict_streams
from rayk.kernels.pointwise import activate
from rayk.models.build import Build
from rayk.models.config import AltUpConfig, MlpConfig
from rayk.models.layers.embedding import VocabEmbedding, rounded_scale
from rayk.models.layers.linear import Linear
from rayk.models.layers.mixers import Mixer
from rayk.models.layers.mlp import Mlp
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Places
from rayk.models.pieces import Rows
from rayk.parallel import shard

_MIN_SQUARE = 1e-5
"""Lower bound of a projected stream's mean square when it is rescaled to the first one's."""


class StreamsAndInputs(NamedTuple):
    streams: torch.Tensor
    """[S, T, hidden]"""
    inputs: torch.Tensor
    """Per-layer inputs of all layers [L, T, P]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUp:
    """Predicts every stream from all of them, and corrects the predictions by the computed active stream."""

    active: int
    """The stream that a layer computes."""
    router: StreamRouter
    predictor: torch.Tensor
    """[S * S, S]"""
    corrector: torch.Tensor
    """[S, S]"""

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """[S, T, hidden] -> [S, T, hidden]."""
        return predict_streams(streams, self.router, self.predictor, active=self.active)

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Correct predicted [S, T, hidden] by the computed active stream [T, hidden]."""
        return correct_streams(predicted, computed, self.router, self.corrector, active=self.active)


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
class PerLayerInput:
    """Adds a layer's per-layer input at its end, to all streams but the first."""

    active: int
    scale: torch.Tensor | None
    """[hidden], on the active stream before it gates."""
    gate: Linear
    activation: str
    out: Linear
    norm: Norm

    def forward(self, streams: torch.Tensor, per_layer_input: torch.Tensor) -> torch.Tensor:
        """streams [S, T, hidden], changed in place, and per_layer_input [T, P] -> [S, T, hidden]."""
        active = streams[self.active]
        gate = self.gate.forward(active if self.scale is None else active * self.scale)
        gated = activate(gate, self.activation) * per_layer_input
        streams[1:].add_(self.norm.forward(self.out.forward(gated)))
        return streams


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpLayer:
    """A layer with four norms around mixer and feed-forward half, which computes the active stream."""

    index: int
    active: int
    altup: AltUp
    laurel: Laurel
    input_norm: Norm
    mixer: Mixer
    post_mixer_norm: Norm
    mlp_norm: Norm
    mlp: Mlp
    post_mlp_norm: Norm
    per_layer_input: PerLayerInput

    def forward(self, x: StreamsAndInputs, places: Places, metadata: Any) -> StreamsAndInputs:
        predicted = self.altup.predict(x.streams)
        active = predicted[self.active]
        normed = self.input_norm.forward(active)
        mixed = self.post_mixer_norm.forward(self.mixer.forward(normed, places, metadata))
        out = (active + mixed + self.laurel.forward(normed)) / math.sqrt(2)
        out = out + self.post_mlp_norm.forward(self.mlp.forward(self.mlp_norm.forward(out)))
        streams = self.altup.correct(predicted, out)
        return x._replace(streams=self.per_layer_input.forward(streams, x.inputs[self.index]))


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsBegin:
    """Makes the streams and the per-layer inputs of embeddings."""

    spread: tuple[Linear, ...]
    """Maps of the first stream to the others."""
    table: VocabEmbedding
    """[table_size, L * P], looked up by token id; larger ids read row 0."""
    table_size: int
    projection: Linear
    """[L * P, hidden], of the embedding: scaled and normed, it is added to the table's row."""
    projection_scale: float
    projection_norm: Norm
    sum_scale: float
    """Factor on that sum."""

    def spread_out(self, embeddings: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [S, T, hidden]."""
        others = (_of_size(linear.forward(embeddings), embeddings) for linear in self.spread)
        return torch.stack([embeddings, *others])

    def per_layer_inputs(
        self, token_ids: torch.Tensor, embeddings: torch.Tensor, inputs_shape: tuple[int, int]
    ) -> torch.Tensor:
        """Make the inputs [L, T, P], `inputs_shape` being (L, P)."""
        shape = (len(token_ids), *inputs_shape)
        projected = self.projection.forward(embeddings) * self.projection_scale
        projected = self.projection_norm.forward(projected.view(shape))
        rows = self.table.forward(token_ids.where(token_ids < self.table_size, 0))
        return ((projected + rows.view(shape)) * self.sum_scale).transpose(0, 1)


class AltUpStreams:
    """Several residual streams, and per-layer inputs, with the methods of layers.layer.OneStream."""

    def __init__(
        self,
        *,
        begins: StreamsBegin | None,
        merge: tuple[Linear, ...] | None,
        num_streams: int,
        inputs_shape: tuple[int, int],
    ) -> None:
        """`begins`: what the first pipeline stage makes the streams of. `merge`: maps of streams 1 and up to
        the first, on the last stage. `inputs_shape`: (L, P)."""
        self.begins = begins
        self._merge = merge
        self._num_streams = num_streams
        self._inputs_shape = inputs_shape

    def begin(self, token_ids: torch.Tensor, embeddings: torch.Tensor) -> StreamsAndInputs:
        """Make the first layer's input of token ids [T] and their embeddings [T, hidden]."""
        assert self.begins is not None, "on the first stage"
        streams = self.begins.spread_out(embeddings)
        return StreamsAndInputs(
            streams, self.begins.per_layer_inputs(token_ids, embeddings, self._inputs_shape)
        )

    def select(self, x: StreamsAndInputs, tokens: torch.Tensor) -> StreamsAndInputs:
        """Keep only `tokens` (int64 [M])."""
        return StreamsAndInputs(*(part.index_select(1, tokens) for part in x))

    def end(self, x: StreamsAndInputs) -> torch.Tensor:
        """Turn the last layer's output into [T, hidden]."""
        assert self._merge is not None, "on the last stage"
        first = x.streams[0]
        others = (
            _of_size(linear.forward(stream), first)
            for linear, stream in zip(self._merge, x.streams[1:], strict=True)
        )
        return torch.stack([first, *others]).mean(0)

    def pack(self, x: StreamsAndInputs) -> tuple[torch.Tensor, ...]:
        """List the tensors that the next pipeline stage needs."""
        return tuple(x)

    def unpack(self, tensors: tuple[torch.Tensor, ...]) -> StreamsAndInputs:
        """Invert `pack`."""
        return StreamsAndInputs(*tensors)

    def packed_shapes(self, num_tokens: int, hidden_size: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of what `pack` lists for so many tokens."""
        num_layers, size = self._inputs_shape
        return (self._num_streams, num_tokens, hidden_size), (num_layers, num_tokens, size)


def _of_size(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rescale x [T, hidden] to the root mean square of `like`, token by token."""
    target = like.square().mean(-1, keepdim=True).sqrt()
    square = x.square().mean(-1, keepdim=True)
    return x * target / square.clamp(min=_MIN_SQUARE).sqrt()


def build_altup_layer(build: Build, index: int, altup: AltUpConfig, mixer: Mixer, mlp: Mlp) -> AltUpLayer:
    hidden, streams = build.config.hidden_size, altup.num_streams
    return AltUpLayer(
        index=index,
        active=altup.active_stream,
        altup=AltUp(
            active=altup.active_stream,
            router=_router(build, index, streams),
            predictor=_matrix(build, index, "altup_predictor", streams**2, streams),
            corrector=_matrix(build, index, "altup_corrector", streams, streams),
        ),
        laurel=Laurel(
            left=_whole(build, index, "laurel_left", altup.laurel_rank, hidden),
            right=_whole(build, index, "laurel_right", hidden, altup.laurel_rank),
            norm=build.layer_norm(index, "laurel_norm"),
        ),
        input_norm=build.layer_norm(index, "input_norm"),
        mixer=mixer,
        post_mixer_norm=build.layer_norm(index, "post_mixer_norm"),
        mlp_norm=build.layer_norm(index, "mlp_norm"),
        mlp=mlp,
        post_mlp_norm=build.layer_norm(index, "post_mlp_norm"),
        per_layer_input=_per_layer_input(build, index, altup),
    )


def build_altup_streams(build: Build, altup: AltUpConfig) -> AltUpStreams:
    """Build what the rank's pipeline stage needs of the streams."""
    names, num_others = build.pieces.names.around, altup.num_streams - 1
    hidden = build.config.hidden_size

    def merge(stream: int) -> Linear:
        return _around(build, names["merge"].format(s=stream), hidden)

    return AltUpStreams(
        begins=_streams_begin(build, altup) if build.is_first else None,
        merge=tuple(map(merge, range(num_others))) if build.is_last else None,
        num_streams=altup.num_streams,
        inputs_shape=(build.config.num_layers, altup.per_layer_size),
    )


def _streams_begin(build: Build, altup: AltUpConfig) -> StreamsBegin:
    """Build the streams' begin; the table of per-layer inputs is divided by rows (token ids)."""
    config, pieces, names = build.config, build.pieces, build.pieces.names.around
    hidden, width = config.hidden_size, config.num_layers * altup.per_layer_size
    rows = shard.shard_range(altup.per_layer_vocab_size, *build.tp)
    return StreamsBegin(
        spread=tuple(
            _around(build, names["spread"].format(s=s), hidden) for s in range(altup.num_streams - 1)
        ),
        table=VocabEmbedding(
            pieces.rows(names["per_layer_inputs"], (altup.per_layer_vocab_size, width), rows),
            rows,
            build.comm,
            scale=rounded_scale(altup.per_layer_size**0.5, pieces.dtype),
        ),
        table_size=altup.per_layer_vocab_size,
        projection=_around(build, names["per_layer_projection"], width),
        projection_scale=rounded_scale(hidden**-0.5, pieces.dtype),
        projection_norm=build.norm(names["per_layer_norm"], altup.per_layer_size),
        sum_scale=rounded_scale(2**-0.5, pieces.dtype),
    )


def _around(build: Build, name: str, num_rows: int) -> Linear:
    """Return a map of hidden states that belongs to no layer."""
    return Linear(build.pieces.rows(name, (num_rows, build.config.hidden_size), range(num_rows)), None)


def _per_layer_input(build: Build, index: int, altup: AltUpConfig) -> PerLayerInput:
    hidden, mlp = build.config.hidden_size, build.config.layers[index].mlp
    assert isinstance(mlp, MlpConfig), "experts are not combined with several streams"
    # Stored even where it is not used.
    scale = build.pieces.whole(build.name(index, "per_layer_scale"), hidden)
    return PerLayerInput(
        active=altup.active_stream,
        scale=scale if altup.scales_active else None,
        gate=_whole(build, index, "per_layer_gate", altup.per_layer_size, hidden),
        activation=mlp.activation,
        out=_whole(build, index, "per_layer_out", hidden, altup.per_layer_size),
        norm=build.layer_norm(index, "per_layer_norm"),
    )


def _router(build: Build, index: int, num_streams: int) -> StreamRouter:
    hidden, norm = build.config.hidden_size, build.layer_norm(index, "altup_norm")
    assert norm.weight is not None, "a norm of streams has weights"
    return StreamRouter(
        norm=norm.weight,
        eps=norm.eps,
        scale=rounded_scale(1 / hidden, build.pieces.dtype),
        weight=_matrix(build, index, "altup_router", num_streams, hidden),
    )


def _matrix(build: Build, index: int, parameter: str, num_rows: int, num_inputs: int) -> torch.Tensor:
    return build.pieces.stacked(index, (Rows.whole(parameter, num_rows),), "weight", (num_inputs,))


def _whole(build: Build, index: int, parameter: str, num_rows: int, num_inputs: int) -> Linear:
    return build.linear(index, (Rows.whole(parameter, num_rows),), bias=False, num_inputs=num_inputs)
