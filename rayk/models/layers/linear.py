"""Matrix products, whole, or split by input columns over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from rayk.parallel.comm import Comm


class Linear:
    """x W^T + b with the rank's rows of W: the output is the rank's share."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out of this rank]."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear:
    """x W^T + b with the rank's columns of W: partial sums are added over the ranks, b once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, comm: Comm) -> None:
        self.weight = weight
        self.bias = bias
        self._comm = comm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in of this rank] -> [T, out], the same on every rank."""
        if self._comm.size == 1:
            return F.linear(x, self.weight, self.bias)
        total = self._comm.all_reduce(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias
