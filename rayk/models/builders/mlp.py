"""Building feed-forward halves with one set of weights for all tokens: inner rows are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.models.layers.mlp import GateCut, GatedMlp, PlainMlp
from rayk.models.pieces import Rows
from rayk.parallel import shard

if TYPE_CHECKING:
    from rayk.models.builders.context import Build
    from rayk.models.config import MlpConfig


def build_mlp(build: Build, index: int, mlp: MlpConfig, prefix: str = "") -> GatedMlp | PlainMlp:
    """The rank's rows of the feed-forward half of layer `index`, whose names begin with `prefix`."""
    size = mlp.intermediate_size
    rows = (shard.shard_range(size, *build.tp),)
    gate, up, down = (Rows(prefix + name, size, rows) for name in ("gate", "up", "down"))
    columns = build.row_parallel(index, down, bias=mlp.bias)
    if not mlp.gated:
        assert mlp.gate_multiplier == mlp.down_multiplier == 1.0, mlp
        assert not mlp.sparsity, mlp
        return PlainMlp(build.linear(index, (up,), bias=mlp.bias), columns, mlp.activation)
    return GatedMlp(
        build.linear(index, (gate, up), bias=mlp.bias),
        columns,
        mlp.activation,
        gate_multiplier=mlp.gate_multiplier,
        down_multiplier=mlp.down_multiplier,
        cut=GateCut(mlp.sparsity, size, build.comm) if mlp.sparsity else None,
    )
