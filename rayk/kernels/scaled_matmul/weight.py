"""A matrix as fp8 checkpoints store it, kept so.

Legend: O rows (outputs) and I columns (inputs) of a matrix, E experts; R and C blocks of rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

SCHEMES = ("group", "token", "static")


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """W = values * scales, each scale that of a block of the matrix."""

    values: torch.Tensor
    """[O, I] or [E, O, I] e4m3, dense."""
    scales: torch.Tensor
    """[R, C] or [E, R, C] float32. One scale in all: a block is the whole matrix; one per row: [O, 1]."""
    block: tuple[int, int]
    """Rows and columns of a block. The last block of an axis may be cut short."""
    inputs: str
    """How inputs are quantised: group (dynamic, by token and the columns of a block, as DeepSeek-V3's
    inference/kernel.py does in act_quant), token (dynamic, by token) or static (by `input_scale`)."""
    input_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.values.dtype == torch.float8_e4m3fn, self.values.dtype
        assert self.scales.dtype == torch.float32, self.scales.dtype
        assert self.inputs in SCHEMES, self.inputs
        *experts, num_out, num_in = self.values.shape
        (rows, columns) = self.block
        wanted = (*experts, -(-num_out // rows), -(-num_in // columns))
        assert self.scales.shape == wanted, f"scales {tuple(self.scales.shape)}, not {wanted}"

    @property
    def num_outputs(self) -> int:
        return self.values.shape[-2]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[-1]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def has_column_blocks(self) -> bool:
        """Whether scales change along the columns that a product adds up."""
        return self.scales.shape[-1] > 1

    def of_expert(self, index: int) -> ScaledWeight:
        return replace(self, values=self.values[index], scales=self.scales[index])

    def is_like(self, other: ScaledWeight) -> bool:
        """Tell whether the matrices of experts, or one of them, have the form of `other`."""
        own = (*self.shape[-2:], self.block, self.inputs, self.input_scale)
        return own == (*other.shape[-2:], other.block, other.inputs, other.input_scale)

    def room_for(self, count: int) -> ScaledWeight:
        """Return as many matrices like this one, unfilled."""
        values, scales = (t.new_empty(count, *t.shape) for t in (self.values, self.scales))
        return replace(self, values=values, scales=scales)

    def to(self, device: torch.device) -> ScaledWeight:
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))

    def numel(self) -> int:
        return self.values.numel()

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return W in `dtype`: multiplied in float32 (float64 if that is the dtype), rounded once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scales = self.scales.to(wide).repeat_interleave(self.block[0], -2)[..., : self.num_outputs, :]
        scales = scales.repeat_interleave(self.block[1], -1)[..., : self.num_inputs]
        return (self.values.to(wide) * scales).to(dtype)


def can_stack(parts: list[ScaledWeight]) -> bool:
    """Tell whether one product with the matrices row upon row is that with each: their inputs are alike."""
    return len({(p.block[1], p.inputs, p.input_scale) for p in parts}) == 1


def stacked_weight(parts: list[ScaledWeight]) -> ScaledWeight:
    """Stack matrices of the same inputs row upon row. Blocks that would not meet at their borders give way to
    scales of single rows."""
    assert can_stack(parts), parts
    first, *others = parts
    if not others:
        return first
    columns = first.block[1]
    aligned = all(p.block == first.block and p.num_outputs % p.block[0] == 0 for p in parts[:-1])
    if aligned and parts[-1].block == first.block:
        scales, rows = torch.cat([p.scales for p in parts], -2), first.block[0]
    else:
        spread = [p.scales.repeat_interleave(p.block[0], -2)[..., : p.num_outputs, :] for p in parts]
        scales, rows = torch.cat(spread, -2), 1
    values = torch.cat([p.values.view(torch.uint8) for p in parts], -2).view(torch.float8_e4m3fn)
    return ScaledWeight(values, scales, (rows, columns), first.inputs, first.input_scale)
