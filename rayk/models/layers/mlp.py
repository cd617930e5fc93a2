"""Feed-forward halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    import torch

    from rayk.models.layers.linear import Linear, RowParallelLinear


class GatedMlp:
    """down(silu(gate x) * up x); `gate_up` holds the rank's gate rows, then its up rows."""

    def __init__(self, gate_up: Linear, down: RowParallelLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank."""
        gate, up = self.gate_up.forward(x).chunk(2, dim=-1)
        return self.down.forward(F.silu(gate) * up)
