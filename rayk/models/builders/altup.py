"""Building layers of several residual streams, and what stands around them: all of it is on every rank, but
for the table of per-layer embeddings, whose rows (token ids) are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.config import MlpConfig
from rayk.models.layers.altup import AltUp, AltUpLayer, Laurel, PerLayerInput, Streams
from rayk.models.layers.embedding import VocabEmbedding, rounded_scale
from rayk.models.layers.linear import Linear
from rayk.models.pieces import Rows
from rayk.parallel import shard

if TYPE_CHECKING:
    from rayk.models.builders.context import Build
    from rayk.models.config import AltUpConfig
    from rayk.models.decoder import Mixer, Mlp


def build_altup_layer(build: Build, index: int, altup: AltUpConfig, mixer: Mixer, mlp: Mlp) -> AltUpLayer:
    """Layer `index` around its mixer and feed-forward half."""
    hidden, streams = build.config.hidden_size, altup.num_streams
    return AltUpLayer(
        active=altup.active_stream,
        altup=AltUp(
            active=altup.active_stream,
            router_norm=build.layer_norm(index, "altup_norm"),
            router_scale=rounded_scale(1 / hidden, build.pieces.dtype),
            router=_whole(build, index, "altup_router", streams, hidden),
            predictor=_whole(build, index, "altup_predictor", streams**2, streams),
            corrector=_whole(build, index, "altup_corrector", streams, streams),
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
    )


def build_streams(build: Build, altup: AltUpConfig) -> Streams:
    """What stands around the layers."""
    config, pieces, names = build.config, build.pieces, build.pieces.names.around
    hidden, width = config.hidden_size, config.num_layers * altup.per_layer_size

    def matrix(name: str, num_rows: int) -> Linear:
        return Linear(pieces.rows(name, (num_rows, hidden), range(num_rows)), None)

    def scale(value: float) -> float:
        return rounded_scale(value, pieces.dtype)

    rows = shard.shard_range(altup.per_layer_vocab_size, *build.tp)
    return Streams(
        spread=tuple(matrix(names["spread"].format(s=s), hidden) for s in range(altup.num_streams - 1)),
        merge=tuple(matrix(names["merge"].format(s=s), hidden) for s in range(altup.num_streams - 1)),
        table=VocabEmbedding(
            pieces.rows(names["per_layer_inputs"], (altup.per_layer_vocab_size, width), rows),
            rows,
            build.comm,
            scale=scale(altup.per_layer_size**0.5),
        ),
        table_size=altup.per_layer_vocab_size,
        projection=matrix(names["per_layer_projection"], width),
        projection_scale=scale(hidden**-0.5),
        projection_norm=build.norm(names["per_layer_norm"], altup.per_layer_size),
        sum_scale=scale(2**-0.5),
        inputs=tuple(_per_layer_input(build, index, altup) for index in range(config.num_layers)),
    )


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


def _whole(build: Build, index: int, parameter: str, num_rows: int, num_inputs: int) -> Linear:
    every = (Rows(parameter, num_rows, (range(num_rows),)),)
    return build.linear(index, every, bias=False, num_inputs=num_inputs)
