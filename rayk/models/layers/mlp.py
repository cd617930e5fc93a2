"""Feed-forward halves with one set of weights for all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from rayk.models.layers.linear import Linear, RowParallelLinear


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """silu, gelu_tanh (gelu with the tanh approximation) or relu2 (relu squared)."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu2":
        return F.relu(x).square()
    assert kind == "gelu_tanh", kind
    return F.gelu(x, approximate="tanh")


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
    ) -> None:
        """gate x is multiplied by `gate_multiplier` before the activation, the result by the other."""
        self.gate_up = gate_up
        self.down = down
        self._activation = activation
        self._gate_multiplier = gate_multiplier
        self._down_multiplier = down_multiplier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank unless `down` leaves sums partial."""
        gate, up = self.gate_up.forward(x).chunk(2, dim=-1)
        if self._gate_multiplier != 1.0:
            gate = gate * self._gate_multiplier
        out = self.down.forward(activate(gate, self._activation) * up)
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
