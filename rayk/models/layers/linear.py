"""Matrix products, whole, or split by input columns over the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.parallel.comm import Comm

MIN_PACKED_ELEMENTS = {torch.float32: 1 << 18, torch.bfloat16: 1 << 14}
"""Below this, the packed product's fixed cost (12 us a call) exceeds its gain."""
_TYPICAL_ROWS = 16
"""Tokens of a step for which oneDNN chooses the packed order."""


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight [out, in] in oneDNN's own order if that is faster, else unchanged.

    On one CPU core, float32: 1.5 to 2.5 times as fast at 4 to 64 rows. Only `product` takes the result.
    """
    least = MIN_PACKED_ELEMENTS.get(weight.dtype)
    if weight.device.type != "cpu" or least is None or weight.numel() < least:
        return weight
    if not torch._C._has_mkldnn:
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return reordered


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [T, in] by weight^T and add the bias; weight is as `packed` returned it."""
    if weight.is_mkldnn:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


class Linear:
    """x W^T + b with the rank's rows of W: the output is the rank's share."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = packed(weight)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out of this rank]."""
        return product(x, self.weight, self.bias)


class RowParallelLinear:
    """x W^T + b with the rank's columns of W: partial sums are added over the ranks, b once."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, comm: Comm, *, reduce: bool = True
    ) -> None:
        """Without `reduce` the sums stay partial, and only rank 0 adds b: the caller reduces."""
        self.weight = packed(weight)
        self.bias = bias if reduce or comm.rank == 0 else None
        self._comm = comm
        self._reduce = reduce and comm.size > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in of this rank] -> [T, out], the same on every rank, or the rank's partial sums."""
        if not self._reduce:
            return product(x, self.weight, self.bias)
        total = self._comm.all_reduce(product(x, self.weight, None))
        return total if self.bias is None else total + self.bias
