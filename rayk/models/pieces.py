"""A rank's pieces of a checkpoint's tensors, in the model's dtype on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rayk.kernels.scaled_matmul import ScaledWeight, can_stack, kernel_takes, stacked_weight
from rayk.models.families import WeightNames
from rayk.models.weights import WeightReader

StoredPiece = tuple[str, tuple[int, ...], range, range | None]
"""A tensor's name and whole shape, and the rows and columns of it that are read."""
MOST_KINDS = 6
"""Most kinds of matrices that a note lists."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A rank's rows of one parameter that has `size` rows in all."""

    parameter: str
    size: int
    rows: tuple[range, ...]

    @classmethod
    def whole(cls, parameter: str, size: int) -> Rows:
        """Every rank holds the parameter whole."""
        return cls(parameter, size, (range(size),))


def head_rows(heads: Sequence[int], head_size: int) -> tuple[range, ...]:
    """List rows of `heads`, joined if heads follow each other."""
    runs: list[range] = []
    for head in heads:
        start = head * head_size
        if runs and runs[-1].stop == start:
            runs[-1] = range(runs[-1].start, start + head_size)
        else:
            runs.append(range(start, start + head_size))
    return tuple(runs)


@dataclass(slots=True)
class Keeping:
    """Which matrices a rank keeps in fp8, as they are stored, and which it does not."""

    kept: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Quantised ones that had to be dequantised: cut inside a block, or in a form that no kernel takes."""

    @property
    def text(self) -> str:
        """Say it for the results."""
        text = f"{len(self.kept)} matrices kept in fp8"
        if not self.left:
            return text
        kinds = sorted({name.rpartition(".layers.")[2].partition(".")[2] or name for name in self.left})
        return f"{text}, {len(self.left)} dequantised ({', '.join(kinds[:MOST_KINDS])})"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Reads and places pieces. Methods raise CheckpointError naming tensor and file."""

    reader: WeightReader
    names: WeightNames
    dtype: torch.dtype
    device: torch.device
    keeping: Keeping | None = None
    """None: everything is dequantised."""

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def whole(self, name: str, size: int) -> torch.Tensor:
        """Read a whole vector."""
        return self.rows(name, (size,), range(size))

    def rows(self, name: str, shape: tuple[int, ...], rows: range) -> torch.Tensor:
        """Return a copy of `rows` of a tensor of `shape`, which owns its memory."""
        piece = self.reader.read(name, shape, rows)
        return self.empty(len(rows), *shape[1:]).copy_(piece)

    def stacked(
        self, layer: int, parts: Sequence[Rows], kind: str, row_shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the parts' rows, stacked; `kind` is weight or bias. Parts with one name on disk are cut from
        one tensor, which holds them in this order."""
        runs = self._runs(layer, parts, kind, row_shape)
        out = self.empty(sum(len(rows) for _, _, rows in runs), *row_shape)
        filled = 0
        for name, shape, rows in runs:
            out[filled : filled + len(rows)].copy_(self.reader.read(name, shape, rows))
            filled += len(rows)
        return out

    def kept_rows(self, layer: int, parts: Sequence[Rows], num_inputs: int) -> ScaledWeight | None:
        """Return the rows that `stacked` would dequantise as they are stored, if they can be kept so."""
        if self.keeping is None:
            return None
        runs = self._runs(layer, parts, "weight", (num_inputs,))
        return self._kept([(name, shape, rows, None) for name, shape, rows in runs])

    def kept_columns(
        self, name: str, shape: tuple[int, int], columns: Sequence[range]
    ) -> ScaledWeight | None:
        """Return the columns that `columns` would dequantise as they are stored, if they can be kept so."""
        if self.keeping is None or len(columns) != 1:
            return None
        return self._kept([(name, shape, range(shape[0]), columns[0])])

    def kept_experts(
        self, *matrices: tuple[Sequence[Sequence[str]], tuple[int, int]]
    ) -> list[ScaledWeight] | None:
        """Return matrices of experts as stored, each given as (every expert's tensors, by name, which are
        stacked; their shape). None, noted, if one of them cannot be kept: kernels take an expert's matrices
        in one form."""
        if self.keeping is None:
            return None
        kept = []
        for experts, shape in matrices:
            found = self._stack_experts(experts, shape)
            if found is None:
                break
            kept.append(found)
        is_kept = len(kept) == len(matrices)
        self._note([name for experts, _ in matrices for names in experts for name in names], is_kept)
        return kept if is_kept else None

    def _stack_experts(self, experts: Sequence[Sequence[str]], shape: tuple[int, int]) -> ScaledWeight | None:
        """Return a matrix of every expert; None without experts, and where they are not alike."""
        kept: ScaledWeight | None = None
        for slot, names in enumerate(experts):
            found = self._read_kept([(name, shape, range(shape[0]), None) for name in names])
            if found is None or (kept is not None and not kept.is_like(found)):
                return None
            kept = found.room_for(len(experts)) if kept is None else kept
            kept.values[slot].copy_(found.values)
            kept.scales[slot].copy_(found.scales)
        return kept

    def _kept(self, pieces: Sequence[StoredPiece]) -> ScaledWeight | None:
        """Read pieces and stack them; None, noted, if one of them cannot be kept."""
        found = self._read_kept(pieces)
        self._note([name for name, *_ in pieces], found is not None)
        return found

    def _read_kept(self, pieces: Sequence[StoredPiece]) -> ScaledWeight | None:
        """Read pieces and stack them; None if one of them cannot be kept."""
        found = [self.reader.keep(*piece) for piece in pieces]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found) or not can_stack(parts) or not self._fits(parts[0]):
            return None
        return stacked_weight(parts).to(self.device)

    def _note(self, names: Sequence[str], is_kept: bool) -> None:
        """Note that matrices are kept as stored, or dequantised."""
        if not is_kept:
            for name in names:
                self.leave(name)
        elif self.keeping is not None:
            self.keeping.kept += names

    def leave(self, name: str) -> None:
        """Note that a matrix is dequantised, if it is stored quantised."""
        if self.keeping is not None and self.reader.is_quantised(name):
            self.keeping.left.append(name)

    def _fits(self, part: ScaledWeight) -> bool:
        """Tell whether the device's kernel takes blocks of these sides; a CPU's reference takes all."""
        return self.device.type != "cuda" or kernel_takes(part.block, part.num_inputs)

    def _runs(
        self, layer: int, parts: Sequence[Rows], kind: str, row_shape: tuple[int, ...]
    ) -> list[tuple[str, tuple[int, ...], range]]:
        """List (name, whole shape, rows) of the parts' rows on disk, in their order, checked."""
        names = [self.names.in_layer(layer, f"{part.parameter}.{kind}") for part in parts]
        stored: dict[str, int] = {}
        starts = []
        for name, part in zip(names, parts, strict=True):
            starts.append(stored.get(name, 0))
            stored[name] = starts[-1] + part.size
        for name in {name for name, part in zip(names, parts, strict=True) if part.rows}:
            self.reader.require(name, (stored[name], *row_shape))
        return [
            (name, (stored[name], *row_shape), range(start + rows.start, start + rows.stop))
            for name, start, part in zip(names, starts, parts, strict=True)
            for rows in part.rows
        ]

    def columns(self, name: str, shape: tuple[int, int], columns: Sequence[range]) -> torch.Tensor:
        """Return the runs of `columns` of a matrix, side by side."""
        self.reader.require(name, shape)
        out = self.empty(shape[0], sum(len(run) for run in columns))
        filled = 0
        for run in columns:
            piece = self.reader.read(name, shape, columns=run)
            out[:, filled : filled + len(run)].copy_(piece)
            filled += len(run)
        return out

    def experts(self, layer: int, parameter: str, experts: range, shape: tuple[int, ...]) -> torch.Tensor:
        """`experts` (the first axis) of a tensor of `shape`, read one by one."""
        name = self.names.in_layer(layer, parameter)
        # Check it even if this rank holds nothing, since other ranks need it.
        self.reader.require(name, shape)
        out = self.empty(len(experts), *shape[1:])
        for slot, expert in enumerate(experts):
            out[slot].copy_(self.reader.read(name, shape, range(expert, expert + 1))[0])
        return out
