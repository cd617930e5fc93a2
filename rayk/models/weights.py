"""Reads pieces of tensors from a folder of safetensors files, dequantised where the release is quantised."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rayk.kernels.scaled_matmul import ScaledWeight
from rayk.models.formats import Fp8, Quantisation, WeightFormat
from rayk.models.headers import StoredTensor, stored_tensors
from rayk.types.errors import CheckpointError

OpenWeights = Callable[[Path, Callable[[str], str], Quantisation | None], "WeightReader"]
"""(a checkpoint's folder, a tensor's name on disk -> the name by which it is requested, how its weights are
quantised) -> its reader."""

READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
_META_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Dtypes that pieces without memory keep; others are float32."""


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

    def __init__(
        self,
        folder: str | Path,
        plain: Callable[[str], str] = str,
        quantisation: Quantisation | None = None,
    ) -> None:
        """`plain`: a tensor's name on disk -> the name by which it is requested. `quantisation`: how tensors
        are stored that are not plain."""
        self._stored = {plain(name): (name, t) for name, t in stored_tensors(Path(folder)).items()}
        self.folder = Path(folder)
        self._quantisation = quantisation
        self._open = contextlib.ExitStack()
        self._handles: dict[Path, Any] = {}
        self._unread = set(self._stored)
        self._taken_bytes = 0
        self.max_read_bytes = 0
        """Most bytes that one piece took while it was read: as stored, and dequantised."""
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

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the tensor `name`, which counts as read. Raises CheckpointError naming tensor and file if it
        is missing, of another shape, or in an unsupported dtype: before anything of `shape` is allocated."""
        stored_as = self._format(name)
        if stored_as is None:
            self.require_stored(name, shape, READABLE_DTYPES)
        else:
            with self._told_where():
                stored_as.require(self, name, shape)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> torch.Tensor:
        """`rows` (first axis) and `columns` (second) of the tensor `name`, whose whole shape must be `shape`;
        in the checkpoint's dtype, or dequantised in float32; on the CPU. Raises CheckpointError naming tensor
        and file."""
        self.require(name, shape)
        rows = range(shape[0]) if rows is None else rows
        stored_as = self._format(name)
        self._taken_bytes = 0
        if stored_as is None:
            piece = self.take(name, rows, columns)
            self._count(0)
        else:
            with self._told_where():
                piece = stored_as.read(self, name, shape, rows, columns)
            self._count(piece.nbytes)
        return piece

    def keep(
        self, name: str, shape: tuple[int, ...], rows: range, columns: range | None = None
    ) -> ScaledWeight | None:
        """Return the piece that `read` would dequantise as it is stored; None if it is not stored in 8-bit
        floats, or no kernel takes it so (Fp8.keep). Raises like `read`."""
        self.require(name, shape)
        stored_as = self._format(name)
        if not isinstance(stored_as, Fp8):
            return None
        self._taken_bytes = 0
        with self._told_where():
            piece = stored_as.keep(self, name, shape, rows, columns)
        self._count(0)
        return piece

    def is_quantised(self, name: str) -> bool:
        """Tell whether the files hold the tensor in a format of quantised weights."""
        return self._format(name) is not None

    @contextlib.contextmanager
    def _told_where(self) -> Iterator[None]:
        """Add the folder to an error of a format, which knows none."""
        try:
            yield
        except CheckpointError as error:
            if error.where:
                raise
            raise replace(error, where=str(self.folder)) from error

    def _format(self, name: str) -> WeightFormat | None:
        """Return the format in which the files hold the tensor; None if it is plain."""
        if self._quantisation is None:
            return None
        found = self._quantisation.format_of(name)
        return found if found is not None and found.holds(self, name) else None

    def _count(self, num_bytes: int) -> None:
        """Count a piece that was read, for which `num_bytes` were made beside those taken from the files."""
        self.max_read_bytes = max(self.max_read_bytes, self._taken_bytes + num_bytes)
        self.total_read_bytes += self._taken_bytes

    def dtype_of(self, name: str) -> str | None:
        return self._stored[name][1].dtype if name in self._stored else None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._stored[name][1].shape if name in self._stored else None

    def require_stored(self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...]) -> None:
        """Check a tensor as it is stored; it counts as read."""
        if name not in self._stored:
            raise CheckpointError(
                f"tensor {name} is missing",
                where=str(self.folder),
                mend="the weights do not belong to this config.json, or files are missing",
            )
        _, tensor = self._stored[name]
        where = str(tensor.file)
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}",
                where=where,
            )
        if tensor.dtype not in dtypes:
            mend = "one of " + ", ".join(dtypes)
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}", where=where, mend=mend)
        self._unread.discard(name)

    def take(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Read `rows` and `columns` of a tensor as it is stored."""
        piece = self._piece(name, self._stored[name][1], rows, columns)
        self._taken_bytes += piece.nbytes
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

    def _piece(
        self, name: str, tensor: StoredTensor, rows: range | None, columns: range | None
    ) -> torch.Tensor:
        stored_name, _ = self._stored[name]
        try:
            stored = self._handle(tensor.file).get_slice(stored_name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name}: {error}", where=str(tensor.file)) from error
        if rows is None:
            whole: torch.Tensor = self._handle(tensor.file).get_tensor(stored_name)
            return whole
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


class ShapeReader(WeightReader):
    """Stands in for files: every tensor is there in the shape asked for, without memory, on torch's meta
    device, and none is quantised."""

    def __init__(
        self,
        folder: str | Path = ".",
        plain: Callable[[str], str] = str,
        quantisation: Quantisation | None = None,
    ) -> None:
        """Take arguments as WeightReader does; nothing of them counts."""
        del plain, quantisation
        self.folder = Path(folder)
        self._stored, self._unread, self._handles = {}, set(), {}
        self._quantisation, self._open = None, contextlib.ExitStack()

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        runs = (range(shape[0]) if rows is None else rows, columns)
        first = [size if run is None else len(run) for run, size in zip(runs, shape, strict=False)]
        return torch.empty((*first, *shape[2:]), device="meta")


class HeaderReader(WeightReader):
    """A reader of headers alone: its pieces have shapes but no memory, on torch's meta device."""

    def _value(self, stored_name: str, tensor: StoredTensor) -> float:
        return 1.0

    def _piece(
        self, name: str, tensor: StoredTensor, rows: range | None, columns: range | None
    ) -> torch.Tensor:
        runs = zip((rows, columns), tensor.shape[:2], strict=False)
        first = [size if run is None else len(run) for run, size in runs]
        dtype = _META_DTYPES.get(tensor.dtype, torch.float32)
        return torch.empty((*first, *tensor.shape[2:]), device="meta", dtype=dtype)
