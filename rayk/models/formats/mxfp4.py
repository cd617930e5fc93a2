"""4-bit floats in groups of 32 with a shared power of two (OCP Microscaling Formats 1.0), as in gpt-oss.

Experts only: `NAME_blocks` [E, out, in / 32, 16] holds two elements per byte, the lower half first,
`NAME_scales` [E, out, in / 32] the exponents, biased by 127. The plain tensor `NAME` is their transpose
[E, in, out] (transformers/integrations/mxfp4.py, convert_moe_packed_tensors).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayk.models.formats.format import Source
from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32
"""Elements that share a scale."""
GROUP_BYTES = GROUP // 2 + 1
BIAS = 127
NO_NUMBER = 255
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The codes 0 to 7 (E2M1) mean these; 8 to 15 are their negatives."""
CHUNK_GROUPS = 1 << 16
"""Groups unpacked at a time: indices take four bytes per byte unpacked."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    @property
    def text(self) -> str:
        return "mxfp4"

    def holds(self, source: Source, name: str) -> bool:
        return source.shape_of(f"{name}_blocks") is not None

    def require(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or shape[1] % GROUP:
            raise CheckpointError(
                f"tensor {name} of shape {list(shape)} cannot be stored in groups of {GROUP}",
                mend=f"experts whose inputs are a multiple of {GROUP}",
            )
        experts, inputs, outputs = shape
        grid = (experts, outputs, inputs // GROUP)
        source.require_stored(f"{name}_blocks", (*grid, GROUP // 2), ("U8",))
        source.require_stored(f"{name}_scales", grid, ("U8", "F8_E8M0"))

    def read(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> Tensor:
        import torch

        assert columns is None, "experts are cut by experts alone"
        exponents = source.take(f"{name}_scales", rows)
        if not exponents.is_meta and (exponents.view(torch.uint8) == NO_NUMBER).any():
            raise CheckpointError(f"tensor {name}_scales holds {NO_NUMBER}, the scale that is no number")
        return dequantised(source.take(f"{name}_blocks", rows), exponents).mT

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        is_packed = ".experts." in name and not name.endswith("bias")
        return math.prod(shape) // GROUP * GROUP_BYTES if is_packed else None


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack `blocks` [..., groups, 16] times 2^(`scales` [..., groups] - 127): float32 [..., 32 groups]."""
    import torch

    halves = torch.tensor((*VALUES, *(-value for value in VALUES)), device=blocks.device)
    # Both values of every byte.
    pairs = torch.stack([halves.repeat(16), halves.repeat_interleave(16)], 1)
    *before, groups, _ = blocks.shape
    values = torch.empty((math.prod(before) * groups, GROUP), device=blocks.device)
    packed, exponents = blocks.reshape(-1, GROUP // 2), scales.view(torch.uint8).reshape(-1, 1)
    for start in range(0, len(values), CHUNK_GROUPS):
        part = values[start : start + CHUNK_GROUPS]
        index = packed[start : start + CHUNK_GROUPS].reshape(-1).int()
        torch.index_select(pairs, 0, index, out=part.view(-1, 2))
        torch.ldexp(part, exponents[start : start + CHUNK_GROUPS].int() - BIAS, out=part)
    return values.view(*before, groups * GROUP)
