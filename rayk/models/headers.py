"""Reads the headers of a checkpoint's weight files, for the loader and the fingerprint. Free of torch."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rayk.models.families.raw import read_json
from rayk.types.errors import CheckpointError
from rayk.types.files import JSON_BYTES, open_plain, parse_json

INDEX_FILE = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its bytes in the file."""
    num_bytes: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, by the index or, without one, of the only file; other files are ignored.

    Raises CheckpointError for a file that is missing, unreadable or too short, and if it is unclear which
    file counts.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        return dict(_indexed(index))
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise CheckpointError(
            f"{len(files)} .safetensors files and no {INDEX_FILE}",
            where=str(folder),
            mend="one file, or an index that says which tensor is where",
        )
    return read_header(files[0])


def check_weights(folder: Path) -> None:
    """Raise CheckpointError for weights that `stored_tensors` cannot find, read or trust."""
    stored_tensors(folder)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of one file by name. Raises CheckpointError.

    The format: 8 bytes of header length (little-endian), a JSON header, the data.
    """
    try:
        return _tensors(file)
    except (OSError, struct.error, ValueError) as error:
        raise CheckpointError(
            f"not a readable safetensors file: {error}",
            where=str(file),
            mend="download or write the file again",
        ) from error


def _tensors(file: Path) -> dict[str, StoredTensor]:
    with open_plain(file) as handle:
        (length,) = _LENGTH.unpack(handle.read(_LENGTH.size))
        size = os.fstat(handle.fileno()).st_size
        start = _LENGTH.size + length
        if not 0 < length <= JSON_BYTES or start > size:
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        header = parse_json(handle.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")  # noqa: TRY004 - a file's fault, not a caller's
    found = {n: _tensor(start, n, e, file) for n, e in header.items() if n != "__metadata__"}
    end = max((t.start + t.num_bytes for t in found.values()), default=0)
    if size < end:
        raise ValueError(f"{size} of {end} bytes are there")
    return found


def _tensor(data_start: int, name: str, entry: Any, file: Path) -> StoredTensor:
    """Raises ValueError for an entry that does not describe a tensor's bytes."""
    values = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (values.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name} lacks a dtype, shape or data_offsets")
    begin, end = offsets
    num_bits = int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8)
    if end < begin or (end - begin) * 8 != math.prod(shape) * num_bits:
        raise ValueError(f"tensor {name}, {dtype} {shape}, cannot have {end - begin} bytes")
    return StoredTensor(file, dtype, tuple(shape), data_start + begin, end - begin)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    """Tell whether these are at most 16 non-negative int64 numbers."""
    return (
        isinstance(values, list)
        and len(values) <= 16
        and all(type(v) is int and 0 <= v < 1 << 62 for v in values)
    )


def _is_beside(index: Path, name: str) -> bool:
    """Tell whether a name stays in the index's folder, or links to the blobs of a Hugging Face cache."""
    if Path(name).name != name or name in ("", ".."):
        return False
    try:
        folder, real = index.parent.resolve(), Path(os.path.realpath(index.parent / name))
    except ValueError:  # no file can have this name
        return True
    is_cache = folder.parent.name == "snapshots"
    return real.parent == folder or (is_cache and real.parent == folder.parents[1] / "blobs")


def _indexed(index: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors that the index of a split checkpoint names. Raises CheckpointError."""
    names, folder = read_json(index).get("weight_map"), index.parent
    if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
        raise CheckpointError("`weight_map` is missing, or does not map names to files", where=str(index))
    files = sorted(set(names.values()))
    outside = [f for f in files if not _is_beside(index, f)]
    if outside:
        raise CheckpointError(
            f"the index names files outside its folder: {', '.join(map(repr, outside[:3]))}",
            where=str(index),
            mend="names of files beside the index",
        )
    missing = [f for f in files if not os.path.isfile(folder / f)]  # noqa: PTH113 - False of a name that no file can have
    if missing:
        raise CheckpointError(
            f"the index names files that are not there: {', '.join(missing[:3])}",
            where=str(index),
            mend="download the missing files",
        )
    headers = {f: read_header(folder / f) for f in files}
    for name, file in names.items():
        if name not in headers[file]:
            raise CheckpointError(
                f"the index says that tensor {name} is in {file}, which lacks it",
                where=str(index),
                mend="download or write the checkpoint again",
            )
        yield name, headers[file][name]
