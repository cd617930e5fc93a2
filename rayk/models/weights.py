"""Reads pieces of tensors from a folder of safetensors files."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rayk.models.headers import StoredTensor, stored_tensors
from rayk.types.errors import CheckpointError

OpenWeights = Callable[[Path, Callable[[str], str]], "WeightReader"]
"""(a checkpoint's folder, a tensor's name on disk -> the name by which it is requested) -> its reader."""

READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"not a readable safetensors file: {error}",
            where=str(file),
            mend="download or write the file again",
        ) from error


class WeightReader:
    """Pieces of a checkpoint's tensors; only requested pieces are read from the files."""

    def __init__(self, folder: str | Path, plain: Callable[[str], str] = str) -> None:
        """`plain`: a tensor's name on disk -> the name by which it is requested."""
        self._stored = {plain(name): (name, t) for name, t in stored_tensors(Path(folder)).items()}
        self.folder = Path(folder)
        self._open = contextlib.ExitStack()
        self._handles: dict[Path, Any] = {}
        self._unread = set(self._stored)
        self.max_read_bytes = 0
        self.total_read_bytes = 0

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handles.clear()
        self._open.close()

    @property
    def unread(self) -> frozenset[str]:
        """Names on disk of tensors that were not read."""
        return frozenset(self._stored[name][0] for name in self._unread)

    @property
    def names(self) -> frozenset[str]:
        """Names on disk of all tensors."""
        return frozenset(name for name, _ in self._stored.values())

    def require(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return the tensor `name`, which counts as read. Raises CheckpointError naming tensor and file if it
        is missing, of another shape, or in an unsupported dtype: before anything of `shape` is allocated."""
        if name not in self._stored:
            raise CheckpointError(
                f"tensor {name} is missing",
                where=str(self.folder),
                mend="the weights do not belong to this config.json, or files are missing",
            )
        _, tensor = self._stored[name]
        where = str(tensor.file)
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}",
                where=where,
            )
        if tensor.dtype not in READABLE_DTYPES:
            mend = "one of " + ", ".join(READABLE_DTYPES)
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}", where=where, mend=mend)
        self._unread.discard(name)
        return tensor

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> torch.Tensor:
        """`rows` (first axis) and `columns` (second) of the tensor `name`, whose whole shape must be `shape`;
        in the checkpoint's dtype, on the CPU. Raises CheckpointError naming tensor and file."""
        tensor = self.require(name, shape)
        rows = range(shape[0]) if rows is None else rows
        piece = self._piece(name, tensor, rows, columns)
        num_bytes = piece.numel() * piece.element_size()
        self.max_read_bytes = max(self.max_read_bytes, num_bytes)
        self.total_read_bytes += num_bytes
        return piece

    def scalar(self, name: str) -> float | None:
        """Return the only element of the tensor `name`; None if absent. Raises CheckpointError if it has
        several."""
        if name not in self._stored:
            return None
        stored_name, tensor = self._stored[name]
        if math.prod(tensor.shape) != 1:
            where = str(tensor.file)
            raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, not one", where=where)
        self._unread.discard(name)
        return self._value(stored_name, tensor)

    def _value(self, stored_name: str, tensor: StoredTensor) -> float:
        return float(self._handle(tensor.file).get_tensor(stored_name))

    def _piece(self, name: str, tensor: StoredTensor, rows: range, columns: range | None) -> torch.Tensor:
        stored_name, _ = self._stored[name]
        try:
            stored = self._handle(tensor.file).get_slice(stored_name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name}: {error}", where=str(tensor.file)) from error
        piece: torch.Tensor = (
            stored[rows.start : rows.stop]
            if columns is None
            else stored[rows.start : rows.stop, columns.start : columns.stop]
        )
        return piece

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(_open(file))
        return self._handles[file]


class HeaderReader(WeightReader):
    """A reader of headers alone: its pieces have shapes but no memory, on torch's meta device."""

    def _value(self, stored_name: str, tensor: StoredTensor) -> float:
        return 1.0

    def _piece(self, name: str, tensor: StoredTensor, rows: range, columns: range | None) -> torch.Tensor:
        second = tensor.shape[1:2] if columns is None else (len(columns),)
        return torch.empty((len(rows), *second, *tensor.shape[2:]), device="meta")
