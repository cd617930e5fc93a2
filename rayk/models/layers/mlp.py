"""Feed-forward halves with one set of weights for all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from rayk.models.layers.linear import Linear, RowParallelLinear


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """silu, or gelu_tanh: gelu with the tanh approximation."""
    if kind == "silu":
        return F.silu(x)
    assert kind == "gelu_tanh", kind
    return F.gelu(x, approximate="tanh")


class GatedMlp:
    """down(act(gate x) * up x); `gate_up` holds the rank's gate rows, then its up rows."""

    def __init__(self, gate_up: Linear, down: RowParallelLinear, activation: str = "silu") -> None:
        self.gate_up = gate_up
        self.down = down
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank unless `down` leaves sums partial."""
        gate, up = self.gate_up.forward(x).chunk(2, dim=-1)
        return self.down.forward(activate(gate, self._activation) * up)
