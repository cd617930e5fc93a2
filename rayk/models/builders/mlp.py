"""Building feed-forward halves with one set of weights for all tokens: inner rows are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.layers.mlp import GatedMlp
from rayk.models.pieces import Rows
from rayk.parallel import shard

if TYPE_CHECKING:
    from rayk.models.builders.context import Build
    from rayk.models.config import MlpConfig
    from rayk.models.decoder import Mlp


def build_mlp(build: Build, index: int, mlp: MlpConfig) -> Mlp:
    """The rank's rows of the feed-forward half of layer `index`."""
    assert mlp.gated, "no feed-forward half without a gate yet"
    size = mlp.intermediate_size
    rows = (shard.shard_range(size, *build.tp),)
    return GatedMlp(
        build.linear(index, (Rows("gate", size, rows), Rows("up", size, rows)), bias=mlp.bias),
        build.row_parallel(index, Rows("down", size, rows), bias=mlp.bias),
        mlp.activation,
    )
