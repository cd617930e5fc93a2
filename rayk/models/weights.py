"""Reading pieces of tensors from a folder of safetensors files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rayk.models.headers import INDEX_FILE, indexed_files
from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch

READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or, without one, from the only file's header.

    Raises CheckpointError when a file is missing, unreadable, or it is unclear which file counts.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        return indexed_files(index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise CheckpointError(
            f"{len(files)} .safetensors files and no {INDEX_FILE}",
            where=str(folder),
            mend="one file, or an index that says which tensor is where",
        )
    with _open(files[0]) as handle:
        return dict.fromkeys(handle.keys(), files[0])


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
    """Pieces of a checkpoint's tensors; only what is asked for is read from the files."""

    def __init__(self, folder: str | Path, plain: Callable[[str], str] = str) -> None:
        """`plain`: a tensor's name on disk -> the name it is asked for by."""
        files = weight_files(Path(folder))
        self._files = {plain(name): (file, name) for name, file in files.items()}
        self.folder = Path(folder)
        self._open = contextlib.ExitStack()
        self._handles: dict[Path, Any] = {}
        self._unread = set(self._files)
        self.max_read_bytes = 0
        """Largest piece read so far."""
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
        """Tensors of the checkpoint of which nothing was read."""
        return frozenset(self._unread)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> torch.Tensor:
        """`rows` (and `columns`) of the tensor `name`, whose whole shape must be `shape`.

        Rows are of the first axis, columns of the second. In the checkpoint's dtype, on the CPU.
        Raises CheckpointError naming tensor and file.
        """
        if name not in self._files:
            raise CheckpointError(
                f"tensor {name} is missing",
                where=str(self.folder),
                mend="the weights do not belong to this config.json, or files are missing",
            )
        file, stored_name = self._files[name]
        try:
            stored = self._handle(file).get_slice(stored_name)
            found = tuple(stored.get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name}: {error}", where=str(file)) from error
        if found != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found)}, config.json asks for {list(shape)}",
                where=str(file),
            )
        if stored.get_dtype() not in READABLE_DTYPES:
            raise CheckpointError(
                f"tensor {name} has dtype {stored.get_dtype()}",
                where=str(file),
                mend="one of " + ", ".join(READABLE_DTYPES),
            )
        rows = range(shape[0]) if rows is None else rows
        piece: torch.Tensor = (
            stored[rows.start : rows.stop]
            if columns is None
            else stored[rows.start : rows.stop, columns.start : columns.stop]
        )
        self._unread.discard(name)
        num_bytes = piece.numel() * piece.element_size()
        self.max_read_bytes = max(self.max_read_bytes, num_bytes)
        self.total_read_bytes += num_bytes
        return piece

    def scalar(self, name: str) -> float | None:
        """The only element of the tensor `name`; None where the checkpoint has no such tensor.

        Raises CheckpointError naming tensor and file for a tensor of several.
        """
        if name not in self._files:
            return None
        file, stored_name = self._files[name]
        found = self._handle(file).get_tensor(stored_name)
        if found.numel() != 1:
            raise CheckpointError(f"tensor {name} has shape {list(found.shape)}, not one", where=str(file))
        self._unread.discard(name)
        return float(found)

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(_open(file))
        return self._handles[file]
