"""Packed unsigned integers with a scale and a zero point per group of inputs: AWQ, GPTQ, compressed-tensors.

A plain matrix [out, in] is (code - zero point) * scale, which float32 holds exactly for scales of 16
bits. Codes and zero points lie in words of 32 bits, the first in the lowest bits, unless a format says
otherwise.

R: rows (outputs) of a piece; C: its columns (inputs); G: groups of inputs that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayk.models.formats.format import SCALES, Source, beside, is_linear, take_scales
from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS, WORD_BYTES = 32, 4
WORDS = ("I32",)
SCALE_BYTES = 2
CHUNK_COLUMNS = 256
"""Columns unpacked at a time: codes and spread scales of all at once would double a piece."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How a format's integers lie, and by which groups they are scaled."""

    bits: int
    """4 or 8."""
    group_size: int | None
    """Inputs that share a scale; None: all."""

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    @property
    def text(self) -> str:
        scaled = "a scale per channel" if self.group_size is None else f"groups of {self.group_size}"
        return f"int{self.bits}, {scaled}"

    def num_groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def words(self, size: int) -> int:
        """Count the words that hold `size` integers."""
        return -(-size // self.per_word)

    def words_of(self, run: range) -> range:
        """Return the words that hold the integers of `run`."""
        return range(run.start // self.per_word, self.words(run.stop))

    def words_within(self, run: range, larger: range) -> slice:
        """Return where the words of `run` lie among those of `larger`."""
        words, first = self.words_of(run), self.words_of(larger).start
        return slice(words.start - first, words.stop - first)

    def trimmed(self, values: Tensor, run: range, axis: int) -> Tensor:
        """Cut the integers of whole words to those of `run`."""
        return values.narrow(axis, run.start % self.per_word, len(run))

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Count codes, scales and packed zero points of a piece; None for what is no layer's linear map."""
        if not is_linear(name, shape):
            return None
        rows, columns = shape
        groups = self.num_groups(columns)
        return rows * self.words(columns) * WORD_BYTES + groups * rows * (8 * SCALE_BYTES + self.bits) // 8

    def groups_of(self, columns: range) -> range:
        """Return the groups in which `columns` lie, where groups are of neighbours."""
        if self.group_size is None:
            return range(1)
        return range(columns.start // self.group_size, -(-columns.stop // self.group_size))


def unpacked(words: Tensor, bits: int, axis: int) -> Tensor:
    """Return the unsigned integers in `words` [a, b] int32, uint8, with `axis` longer by their number per
    word."""
    import torch

    found = words.contiguous().view(torch.uint8).view(*words.shape, WORD_BYTES)
    if bits == 4:
        found = torch.stack((found & 15, found >> 4), -1).flatten(-2)
    return found.movedim(-1, axis + 1).flatten(axis, axis + 1)


def group_index(
    source: Source, grid: Grid, name: str | None, inputs: int, columns: range
) -> tuple[range, Tensor]:
    """Return the groups that `columns` need, and each column's [C], counted from the first of them. `name`
    is the tensor that holds the group of every input, if they are not in order. Raises CheckpointError for
    groups that do not exist."""
    import torch

    if name is None:
        groups = grid.groups_of(columns)
        size = grid.group_size or inputs
        return groups, torch.arange(columns.start, columns.stop) // size - groups.start
    index, num_groups = source.take(name, columns).long(), grid.num_groups(inputs)
    if index.is_meta or not len(index):
        return range(num_groups), index
    least, most = int(index.min()), int(index.max())
    if least < 0 or most >= num_groups:
        raise CheckpointError(f"tensor {name} names groups {least} to {most} of {num_groups}")
    return range(least, most + 1), index - least


def dequantised(
    codes: Callable[[range], Tensor],
    columns: range,
    zeros: Tensor | int,
    scales: Tensor,
    index: Tensor,
    *,
    transposed: bool,
) -> Tensor:
    """Return (codes - zeros) * scales [R, C] in float32, some columns at a time: codes(columns) [R, theirs],
    zeros and scales [R, G], index [C]. `transposed`: a column's elements are neighbours in memory, as its
    codes are."""
    import torch

    points = None if isinstance(zeros, int) else zeros.float()
    num_rows, index = len(scales), index.to(scales.device)
    if transposed:
        values = torch.empty((len(columns), num_rows), device=scales.device).mT
    else:
        values = torch.empty((num_rows, len(columns)), device=scales.device)
    for start in range(0, len(columns), CHUNK_COLUMNS):
        run, groups = columns[start : start + CHUNK_COLUMNS], index[start : start + CHUNK_COLUMNS]
        part = values[:, start : start + CHUNK_COLUMNS].copy_(codes(run))
        part.sub_(zeros if points is None else points[:, groups]).mul_(scales[:, groups])
    return values


def require_matrix(name: str, shape: tuple[int, ...], outputs: int = 1, inputs: int = 1) -> None:
    """Refuse a tensor that is no matrix, or whose sides are no multiples of `outputs` and `inputs`."""
    if len(shape) != 2 or shape[0] % outputs or shape[1] % inputs:
        raise CheckpointError(
            f"tensor {name} of shape {list(shape)} cannot be stored in packed integers",
            mend=f"a matrix of a multiple of {outputs} outputs and {inputs} inputs",
        )


@dataclass(frozen=True, slots=True)
class Awq:
    """AutoAWQ's `gemm` files: matrices transposed, words along the outputs.

    `qweight` [in, out / 8], `qzeros` [G, out / 8], `scales` [G, out]; a word's nibbles from the lowest are
    outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight (awq/modules/linear/gemm.py, WQLinear_GEMM.from_linear).
    """

    group_size: int | None

    @property
    def grid(self) -> Grid:
        return Grid(4, self.group_size)

    @property
    def text(self) -> str:
        return f"awq {self.grid.text}"

    def holds(self, source: Source, name: str) -> bool:
        return _is_packed(source, name, "qweight")

    def require(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        require_matrix(name, shape, outputs=self.grid.per_word, inputs=self.group_size or 1)
        groups, words = self.grid.num_groups(shape[1]), self.grid.words(shape[0])
        source.require_stored(beside(name, "qweight"), (shape[1], words), WORDS)
        source.require_stored(beside(name, "qzeros"), (groups, words), WORDS)
        source.require_stored(beside(name, "scales"), (groups, shape[0]), SCALES)

    def read(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> Tensor:
        columns = range(shape[1]) if columns is None else columns
        words = self.grid.words_of(rows)
        groups, index = group_index(source, self.grid, None, shape[1], columns)
        packed = source.take(beside(name, "qweight"), columns, words)
        zeros = source.take(beside(name, "qzeros"), groups, words)
        scales = take_scales(source, beside(name, "scales"), groups, rows)

        def plain(words: Tensor) -> Tensor:
            return self.grid.trimmed(_in_order(unpacked(words, 4, 1)), rows, 1).mT

        def codes(run: range) -> Tensor:
            return plain(packed[run.start - columns.start : run.stop - columns.start])

        return dequantised(codes, columns, plain(zeros), scales.mT, index, transposed=True)

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        return self.grid.stored_bytes(name, shape)


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ's files, of AutoGPTQ and gptqmodel: matrices transposed, words along the inputs.

    `qweight` [in / per word, out], `qzeros` [G, out / per word], `scales` [G, out], `g_idx` [in]: each
    input's group (gptqmodel/nn_modules/qlinear/__init__.py, pack_original). Version 1 stores zero points less
    one, the words subtracted whole: where a zero point is 0, the next one carries
    (gptqmodel/utils/model.py, convert_gptq_v1_to_v2_format_module).
    """

    bits: int
    group_size: int | None
    version: int = 1
    ordered: bool = False
    """`desc_act` says that groups are not of neighbours, so that `g_idx` must be there."""

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group_size)

    @property
    def text(self) -> str:
        return f"gptq {self.grid.text}"

    def holds(self, source: Source, name: str) -> bool:
        return _is_packed(source, name, "qweight")

    def require(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        grid = self.grid
        require_matrix(name, shape, outputs=grid.per_word, inputs=grid.per_word)
        groups = grid.num_groups(shape[1])
        source.require_stored(beside(name, "qweight"), (grid.words(shape[1]), shape[0]), WORDS)
        source.require_stored(beside(name, "qzeros"), (groups, grid.words(shape[0])), WORDS)
        source.require_stored(beside(name, "scales"), (groups, shape[0]), SCALES)
        _require_index(source, self._index(source, name), shape[1])

    def read(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> Tensor:
        columns = range(shape[1]) if columns is None else columns
        grid = self.grid
        groups, index = group_index(source, grid, self._index(source, name), shape[1], columns)
        packed = source.take(beside(name, "qweight"), grid.words_of(columns), rows)
        zeros = source.take(beside(name, "qzeros"), groups, grid.words_of(rows))
        if self.version == 1:
            # A one in every field; the sum wraps, as the words' difference did.
            zeros = zeros + sum(1 << shift for shift in range(0, WORD_BITS, self.bits))
        zeros = grid.trimmed(unpacked(zeros, self.bits, 1), rows, 1)
        scales = take_scales(source, beside(name, "scales"), groups, rows)

        def codes(run: range) -> Tensor:
            words = packed[grid.words_within(run, columns)]
            return grid.trimmed(unpacked(words, self.bits, 0), run, 0).mT

        return dequantised(codes, columns, zeros.mT, scales.mT, index, transposed=True)

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        return self.grid.stored_bytes(name, shape)

    def _index(self, source: Source, name: str) -> str | None:
        """Return the name of the tensor of groups; None where they are in order and it was left away."""
        index = beside(name, "g_idx")
        return index if self.ordered or source.shape_of(index) is not None else None


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """compressed-tensors' `pack-quantized`, words along the inputs.

    `weight_packed` [out, in / per word], `weight_scale` [out, G], `weight_zero_point` [out / per word, G]
    unless symmetric, `weight_g_idx` [in] of older releases with groups that are not of neighbours;
    `weight_shape` [2] (compressed_tensors/compressors/pack_quantized). Codes are stored plus half their
    range, and zero points too, so that the two differ by as much.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group_size)

    @property
    def text(self) -> str:
        return f"pack-quantized {self.grid.text}"

    def holds(self, source: Source, name: str) -> bool:
        return _is_packed(source, name, "weight_packed")

    def require(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        require_matrix(name, shape)
        grid = self.grid
        groups = grid.num_groups(shape[1])
        source.require_stored(beside(name, "weight_packed"), (shape[0], grid.words(shape[1])), WORDS)
        source.require_stored(beside(name, "weight_shape"), (2,), ("I64", "I32"))
        source.require_stored(beside(name, "weight_scale"), (shape[0], groups), SCALES)
        if not self.symmetric:
            zeros = beside(name, "weight_zero_point")
            source.require_stored(zeros, (grid.words(shape[0]), groups), WORDS)
        _require_index(source, self._index(source, name), shape[1])

    def read(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> Tensor:
        columns = range(shape[1]) if columns is None else columns
        grid = self.grid
        groups, index = group_index(source, grid, self._index(source, name), shape[1], columns)
        packed = source.take(beside(name, "weight_packed"), rows, grid.words_of(columns))
        scales = take_scales(source, beside(name, "weight_scale"), rows, groups)
        zeros: Tensor | int = 1 << self.bits - 1
        if not self.symmetric:
            words = source.take(beside(name, "weight_zero_point"), grid.words_of(rows), groups)
            zeros = grid.trimmed(unpacked(words, self.bits, 0), rows, 0)

        def codes(run: range) -> Tensor:
            words = packed[:, grid.words_within(run, columns)]
            return grid.trimmed(unpacked(words, self.bits, 1), run, 1)

        return dequantised(codes, columns, zeros, scales, index, transposed=False)

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        return self.grid.stored_bytes(name, shape)

    def _index(self, source: Source, name: str) -> str | None:
        index = beside(name, "weight_g_idx")
        return index if source.shape_of(index) is not None else None


def _require_index(source: Source, name: str | None, inputs: int) -> None:
    """Check the tensor that holds the group of every input, if there is one."""
    if name is not None:
        source.require_stored(name, (inputs,), ("I32", "I64"))


def _is_packed(source: Source, name: str, suffix: str) -> bool:
    return name.endswith(".weight") and source.shape_of(beside(name, suffix)) is not None


def _in_order(values: Tensor) -> Tensor:
    """Put AWQ's outputs [a, 8 b] in order: the k-th lies in the words' nibble 0, 4, 1, 5, 2, 6, 3, 7."""
    # Nibbles [half, place in half] hold outputs 2 * place + half.
    return values.view(len(values), -1, 2, 4).mT.flatten(1)
