"""A rank's pieces of a checkpoint's tensors, in the model's dtype on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayk.models.families import WeightNames
from rayk.models.weights import WeightReader


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


@dataclass(frozen=True, slots=True)
class Pieces:
    """Reads and places pieces. Methods raise CheckpointError naming tensor and file."""

    reader: WeightReader
    names: WeightNames
    dtype: torch.dtype
    device: torch.device

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
        names = [self.names.in_layer(layer, f"{part.parameter}.{kind}") for part in parts]
        stored: dict[str, int] = {}
        starts = []
        for name, part in zip(names, parts, strict=True):
            starts.append(stored.get(name, 0))
            stored[name] = starts[-1] + part.size
        for name in {name for name, part in zip(names, parts, strict=True) if part.rows}:
            self.reader.require(name, (stored[name], *row_shape))
        out = self.empty(sum(len(rows) for part in parts for rows in part.rows), *row_shape)
        filled = 0
        for name, start, part in zip(names, starts, parts, strict=True):
            for rows in part.rows:
                moved = range(start + rows.start, start + rows.stop)
                piece = self.reader.read(name, (stored[name], *row_shape), moved)
                out[filled : filled + len(rows)].copy_(piece)
                filled += len(rows)
        return out

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
