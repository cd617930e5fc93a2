"""8-bit floats with scales: one per block, per output channel or per tensor.

Block scales: DeepSeek-V3 (github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md), with which transformers'
`fp8` and compressed-tensors' `float-quantized` agree. The last blocks of a matrix may be cut off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayk.models.formats.format import SCALES, Source, beside, is_linear, take_scales
from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from rayk.kernels.scaled_matmul import ScaledWeight

FLOATS = ("F8_E4M3", "F8_E5M2")
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""transformers' and DeepSeek's releases use the first, compressed-tensors, ModelOpt and vLLM the second."""
INPUT_SCALES = ("input_scale", "activation_scale")
"""They scale inputs in releases with static scales, of matrices that are kept."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Fp8:
    """Matrices [out, in] of 8-bit floats. `block`: rows and columns that share a scale, None being all."""

    block: tuple[int | None, int | None]
    inputs: str | None = None
    """How a device that multiplies them quantises inputs (kernels.scaled_matmul): group, token or static.
    None: not at all, or in a way that kernels here do not know."""
    values: str | None = None
    """The dtype that config.json names, of FLOATS; None: the files decide."""

    @property
    def text(self) -> str:
        rows, columns = self.block
        if columns is None:
            return f"fp8, a scale per {'tensor' if rows is None else 'channel'}"
        return f"fp8, blocks of {rows} x {columns}"

    def holds(self, source: Source, name: str) -> bool:
        return source.dtype_of(name) in FLOATS

    def require(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        source.require_stored(name, shape, FLOATS if self.values is None else (self.values,))
        if len(shape) != 2:
            raise CheckpointError(
                f"tensor {name} of {len(shape)} axes is stored in 8-bit floats",
                mend="a release in which 8-bit floats are matrices, one tensor an expert",
            )
        for scale in _stored(source, name, INPUT_SCALES):
            source.require_stored(scale, None, SCALES)
        stored = _stored(source, name, SCALE_NAMES)
        if len(stored) > 1:
            raise CheckpointError(
                f"tensor {name} has two tensors of scales, {' and '.join(stored)}",
                mend="remove the one that does not belong to it",
            )
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
    ) -> ScaledWeight | None:
        """Return the piece as stored; None if no kernel takes it so: other values than e4m3, other inputs, or
        columns cut inside a block, whose inputs one token's scale would no longer cover. Rows cut there get
        scales of their own."""
        from rayk.kernels.scaled_matmul import ScaledWeight

        columns = range(shape[1]) if columns is None else columns
        height, width = self.block[0] or len(rows), self.block[1] or len(columns)
        input_scale = self._input_scale(source, name)
        if self.inputs is None or input_scale is None or source.dtype_of(name) != "F8_E4M3":
            return None
        if self.block[1] and (columns.start % width or (columns.stop % width and columns.stop != shape[1])):
            return None
        scales, _ = self._scales(source, name, shape, rows, columns)
        if self.block[0] and rows.start % height:
            first = rows.start % height
            scales, height = scales.repeat_interleave(height, 0)[first : first + len(rows)], 1
        values = source.take(name, rows, columns)
        return ScaledWeight(values, scales, (height, width), self.inputs, input_scale)

    def _input_scale(self, source: Source, name: str) -> float | None:
        """Return the static scale of inputs, 1 where they have dynamic ones; None if it is missing."""
        if self.inputs != "static":
            return 1.0
        stored = _stored(source, name, INPUT_SCALES)
        return float(take_scales(source, stored[0]).max()) if stored else None

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        if not is_linear(name, shape):
            return None
        return math.prod(shape) + math.prod(self._grid(shape)) * SCALE_BYTES

    def _scale(self, source: Source, name: str) -> str:
        """Return the name of the tensor's scales, that of the first convention without any."""
        return next(iter(_stored(source, name, SCALE_NAMES)), beside(name, SCALE_NAMES[0]))

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
            stored = take_scales(source, scale, by_row, by_column)
        else:
            stored = take_scales(source, scale, by_row if num_axes else None)
        return stored.reshape(len(by_row), len(by_column)), (height, width)

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the sides of a block of a matrix."""
        return self.block[0] or shape[0], self.block[1] or shape[1]

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        height, width = self._sizes(shape)
        return -(-shape[0] // height), -(-shape[1] // width)


def _stored(source: Source, name: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the names of those tensors beside `name` that the files hold."""
    return [n for n in (beside(name, suffix) for suffix in suffixes) if source.shape_of(n) is not None]
