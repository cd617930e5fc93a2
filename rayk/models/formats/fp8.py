"""8-bit floats with scales: one per block, per output channel or per tensor.

Block scales: DeepSeek-V3 (github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md), with which transformers'
`fp8` and compressed-tensors' `float-quantized` agree. The last blocks of a matrix may be cut off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayk.models.formats.format import SCALES, Source, beside, is_linear
from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("F8_E4M3", "F8_E5M2")
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""transformers' and DeepSeek's releases use the first, compressed-tensors, ModelOpt and vLLM the second."""
UNUSED = ("input_scale", "activation_scale")
"""They scale inputs in releases with static scales; inputs are not quantised here."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ScaledPiece:
    """A piece as stored: value [r, c] times the scale of its block."""

    values: Tensor
    """[rows, columns], 8-bit floats."""
    scales: Tensor
    """[blocks of rows, blocks of columns], float32."""
    block: tuple[int, int]
    """Rows and columns that share a scale; the last block may be smaller."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """Matrices [out, in] of 8-bit floats. `block`: rows and columns that share a scale, None being all."""

    block: tuple[int | None, int | None]

    @property
    def text(self) -> str:
        rows, columns = self.block
        if columns is None:
            return f"fp8, a scale per {'tensor' if rows is None else 'channel'}"
        return f"fp8, blocks of {rows} x {columns}"

    def holds(self, source: Source, name: str) -> bool:
        return source.dtype_of(name) in FLOATS

    def require(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        source.require_stored(name, shape, FLOATS)
        if len(shape) != 2:
            raise CheckpointError(f"tensor {name} is stored in 8-bit floats, but is no matrix")
        for unused in UNUSED:
            if source.shape_of(beside(name, unused)) is not None:
                source.require_stored(beside(name, unused), None, SCALES)
        scale = self._scale(source, name)
        source.require_stored(scale, self._scale_shape(source.shape_of(scale), shape), SCALES)

    def read(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> Tensor:
        columns = range(shape[1]) if columns is None else columns
        values = source.take(name, rows, columns).float()
        scales, (height, width) = self._scales(source, name, shape, rows, columns)
        first = rows.start % height
        by_row = scales.repeat_interleave(height, 0)[first : first + len(rows)]
        # Block by block in place: a second matrix of scales is not made.
        for block in range(by_row.shape[1]):
            start = max(0, block * width - columns.start % width)
            stop = (block + 1) * width - columns.start % width
            values[:, start:stop].mul_(by_row[:, block : block + 1])
        return values

    def keep(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> ScaledPiece | None:
        """Return the piece as stored; None if a cut lies inside a block."""
        columns = range(shape[1]) if columns is None else columns
        for run, size, step in zip((rows, columns), shape, self._sizes(shape), strict=True):
            if run.start % step or (run.stop % step and run.stop != size):
                return None
        scales, block = self._scales(source, name, shape, rows, columns)
        return ScaledPiece(source.take(name, rows, columns), scales, block)

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        if not is_linear(name, shape):
            return None
        return math.prod(shape) + math.prod(self._grid(shape)) * SCALE_BYTES

    def _scale(self, source: Source, name: str) -> str:
        """Return the name of the tensor's scales, that of the first convention without any."""
        names = [beside(name, suffix) for suffix in SCALE_NAMES]
        return next((n for n in names if source.shape_of(n) is not None), names[0])

    def _scale_shape(self, stored: tuple[int, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the scales must have: of several conventions the stored one."""
        grid = self._grid(shape)
        if stored is not None and self.block[1] is None and len(stored) < 2:
            return stored if grid == (1, 1) and math.prod(stored) == 1 else grid[: len(stored)]
        return grid

    def _scales(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range
    ) -> tuple[Tensor, tuple[int, int]]:
        """Return the scales of the blocks that hold the piece, float32 [blocks of rows, of columns], and the
        sides of a block."""
        height, width = self._sizes(shape)
        scale = self._scale(source, name)
        by_row = range(rows.start // height, -(-rows.stop // height))
        by_column = range(columns.start // width, -(-columns.stop // width))
        num_axes = len(source.shape_of(scale) or ())
        if num_axes == 2:
            stored = source.take(scale, by_row, by_column)
        else:
            stored = source.take(scale, by_row) if num_axes else source.take(scale)
        return stored.float().reshape(len(by_row), len(by_column)), (height, width)

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the sides of a block of a matrix."""
        return self.block[0] or shape[0], self.block[1] or shape[1]

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        height, width = self._sizes(shape)
        return -(-shape[0] // height), -(-shape[1] // width)
