"""Headers of safetensors files, and whether a checkpoint's files are all there. Free of torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayk.models.families.raw import read_json
from rayk.types.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")


def tensor_entries(file: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(name, file offset of the data section, header entry) of each tensor.

    The format: 8 bytes of header length (little-endian), a JSON header, the data. Raises CheckpointError.
    """
    try:
        with file.open("rb") as handle:
            (length,) = _LENGTH.unpack(handle.read(_LENGTH.size))
            header = json.loads(handle.read(length))
        found = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, struct.error, ValueError, AttributeError, MemoryError, OverflowError) as error:
        raise CheckpointError(
            f"not a readable safetensors file: {error}",
            where=str(file),
            mend="download or write the file again",
        ) from error
    for name, entry in found:
        yield name, _LENGTH.size + length, entry


def check_weights(folder: Path) -> None:
    """Raise CheckpointError for a weights file that is missing, unreadable or shorter than it says."""
    index = folder / INDEX_FILE
    if index.is_file():
        indexed_files(index)
    for file in sorted(folder.glob("*.safetensors")):
        end = max((start + entry["data_offsets"][1] for _, start, entry in tensor_entries(file)), default=0)
        if file.stat().st_size < end:
            raise CheckpointError(
                f"not a readable safetensors file: {file.stat().st_size} of {end} bytes are there",
                where=str(file),
                mend="download or write the file again",
            )


def indexed_files(index: Path) -> dict[str, Path]:
    """Tensor name -> file, by the index of a split checkpoint. Raises CheckpointError."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError("`weight_map` is missing", where=str(index))
    missing = sorted({f for f in names.values() if not (index.parent / f).is_file()})
    if missing:
        raise CheckpointError(
            f"the index names files that are not there: {', '.join(missing)}",
            where=str(index),
            mend="download the missing files",
        )
    return {name: index.parent / file for name, file in names.items()}
