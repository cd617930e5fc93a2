"""Matrix products, whole, or split by input columns over the ranks."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.kernels.packed_product import is_packable, pack, packed_product
from rayk.kernels.scaled_matmul import ScaledWeight, scaled_matmul
from rayk.kv.caches import empty_bytes
from rayk.parallel.comm import Comm

MIN_PACKED_ELEMENTS = 1 << 14
"""Below so many elements of a weight, the packed product's fixed cost exceeds its gain."""
STRETCH_BYTES = 64 * 2**20
_LINE = 64  # bytes of a cache line


class HugePages:
    """Memory of weights on huge pages, where the host has them: one row's product would wait for address
    translation as long as it computes. Weights share stretches, each but the newest freed with the last of
    its weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.int8)  # of the newest stretch

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = shape.numel() * dtype.itemsize
        with self._lock:
            if len(self._left) < num_bytes:
                # Pages that nobody touches are not there.
                self._left = empty_bytes(max(num_bytes, STRETCH_BYTES), torch.device("cpu"))
            taken, self._left = self._left[:num_bytes], self._left[-(-num_bytes // _LINE) * _LINE :]
        return taken.view(dtype).view(shape)


_MEMORY = HugePages()


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in] in the order in which a CPU reads it."""

    panels: torch.Tensor
    num_outputs: int

    def numel(self) -> int:
        return self.panels.numel() // (self.panels.shape[0] * self.panels.shape[2]) * self.num_outputs


Weight = torch.Tensor | PackedWeight | ScaledWeight
"""[out, in], in one of the forms in which a rank holds it."""


def packed(weight: torch.Tensor | ScaledWeight) -> Weight:
    """Return the weight [out, in] packed if products with it are then faster, else unchanged."""
    if isinstance(weight, ScaledWeight) or weight.numel() < MIN_PACKED_ELEMENTS or not is_packable(weight):
        return weight
    return PackedWeight(pack(weight, _MEMORY.empty), len(weight))


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [T, in] by weight^T and add the bias; weight is as `packed` returned it."""
    if isinstance(weight, ScaledWeight):
        return scaled_matmul(x, weight, bias)
    if isinstance(weight, PackedWeight):
        return packed_product(x, weight.panels, weight.num_outputs, bias)
    return F.linear(x, weight, bias)


class Linear:
    """x W^T + b with the rank's rows of W: the output is the rank's share."""

    def __init__(self, weight: torch.Tensor | ScaledWeight, bias: torch.Tensor | None) -> None:
        self.weight = packed(weight)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out of this rank]."""
        return product(x, self.weight, self.bias)


class RowParallelLinear:
    """x W^T + b with the rank's columns of W: partial sums are added over the ranks, b once."""

    def __init__(
        self,
        weight: torch.Tensor | ScaledWeight,
        bias: torch.Tensor | None,
        comm: Comm,
        *,
        reduce: bool = True,
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
