"""Feed-forward halves with one set of weights for all tokens; inner rows are divided over the ranks."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from rayk.kernels.pointwise import GateThreshold, activate, gate_sums, gated
from rayk.models.build import Build
from rayk.models.config import MlpConfig
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.pieces import Rows
from rayk.parallel import shard
from rayk.parallel.comm import Comm


class Mlp(Protocol):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank; partial sums in a ParallelLayer."""
        ...


class GateCut:
    """Cuts a token's gates at the quantile of a normal distribution with their mean and deviation.

    These are of all gates of the model: sums are added over the ranks, once
    (gemma3n/modeling_gemma3n.py:970).
    """

    def __init__(self, sparsity: float, num_gates: int, comm: Comm) -> None:
        """`sparsity` is the share below the quantile, `num_gates` counts the gates of all ranks."""
        # transformers computes the quantile in float32 for any model dtype.
        share = torch.tensor(sparsity, dtype=torch.float32)
        self._quantile = float(torch.erfinv(2 * share - 1) * math.sqrt(2))
        self._num_gates = num_gates
        self._comm = comm

    def of(self, gate: torch.Tensor) -> GateThreshold:
        """Find where the rank's gates [T, its own] are cut."""
        sums = gate_sums(gate)
        if self._comm.size > 1:
            sums = self._comm.all_reduce(sums)
        return GateThreshold(sums, self._num_gates, self._quantile)


class GatedMlp:
    """down(act(gate x) * up x); `gate_up` holds the rank's gate rows, then its up rows."""

    def __init__(
        self,
        gate_up: Linear,
        down: RowParallelLinear,
        activation: str = "silu",
        *,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
        cut: GateCut | None = None,
    ) -> None:
        """gate x is multiplied by `gate_multiplier` or `cut` before the activation, the result multiplied by
        `down_multiplier`."""
        self.gate_up = gate_up
        self.down = down
        self._activation = activation
        self._gate_multiplier = gate_multiplier
        self._down_multiplier = down_multiplier
        self._cut = cut
        assert cut is None or gate_multiplier == 1.0, "gates are multiplied or cut"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank unless `down` leaves sums partial."""
        gate_up = self.gate_up.forward(x)
        if self._gate_multiplier == 1.0:
            cut = None if self._cut is None else self._cut.of(gate_up.chunk(2, dim=-1)[0])
            inner = gated(gate_up, self._activation, cut=cut)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            inner = activate(gate * self._gate_multiplier, self._activation) * up
        out = self.down.forward(inner)
        return out if self._down_multiplier == 1.0 else out * self._down_multiplier


class PlainMlp:
    """down(act(up x))."""

    def __init__(self, up: Linear, down: RowParallelLinear, activation: str = "relu2") -> None:
        self.up = up
        self.down = down
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank unless `down` leaves sums partial."""
        return self.down.forward(activate(self.up.forward(x), self._activation))


def build_mlp(build: Build, index: int, mlp: MlpConfig, prefix: str = "") -> GatedMlp | PlainMlp:
    """Build the rank's rows of the feed-forward half of layer `index`, whose parameters begin with
    `prefix`."""
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
