"""Checkpoint hashes, and atomic replacement of folders."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rayk.types.errors import CheckpointError, UserError
from rayk.types.files import JSON_BYTES, PROMPTS_BYTES, open_plain, parse_json, read_bytes, read_text
from rayk.types.noted_hashes import file_sha256

_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 16
_WHOLE_FILE_BYTES = 64 << 20
_MODEL_SUFFIXES = frozenset({".json", ".safetensors"})


def checkpoint_hash(folder: Path, *, whole: bool = False) -> str:
    """SHA-256 over the names and contents of the config and weight files.

    For files over 64 MiB it covers size, modification time, first and last MiB, unless `whole`: then every
    byte (some GB take seconds, once until they change) and no time. Raises CheckpointError without a
    config.json.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            "no Hugging Face checkpoint here (no config.json)",
            where=str(folder),
            mend="pass a checkpoint folder, or write one with `rayk checkpoint FAMILY DIR`",
        )
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _MODEL_SUFFIXES or not path.is_file():
            continue
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0".encode())
        with path.open("rb") as file:
            if stat.st_size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
                continue
            if whole:
                digest.update(bytes.fromhex(file_sha256(path)))
                continue
            digest.update(f"{stat.st_mtime_ns}\0".encode())
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(-_SAMPLE_BYTES, os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """Name -> hash of the config, tokenizer and weight files; files over 64 MiB are sampled."""
    found = {}
    for path in sorted(p for p in folder.iterdir() if p.suffix in _MODEL_SUFFIXES and p.is_file()):
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
            else:
                for i in range(_NUM_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        found[path.name] = digest.hexdigest()
    return found


def is_whole(folder: Path) -> bool:
    """Tell whether a checkpoint has its config, its tokenizer and all weights that its files list.

    A safetensors file starts with the length of its header (8 bytes), which says where each tensor ends.
    """
    if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
        return False
    try:
        index = parse_json(read_text(folder / "model.safetensors.index.json", JSON_BYTES))
        names = set(index["weight_map"].values())
    except FileNotFoundError:
        names = {"model.safetensors"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return all(_is_whole_file(folder / name) for name in names)


def _is_whole_file(path: Path) -> bool:
    try:
        with open_plain(path) as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(size, JSON_BYTES)))
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        return path.stat().st_size == 8 + size + max(ends)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def input_hashes(models: Mapping[str, Path], files: Iterable[str] = ()) -> dict[str, str]:
    """Name -> hash of a run's inputs: its models, by their names, and other files. Missing ones have no
    entry."""
    present = {name: folder for name, folder in models.items() if (folder / "config.json").is_file()}
    hashes = {name: checkpoint_hash(folder) for name, folder in present.items()}
    for name in files:
        if Path(name).is_file():
            hashes[name] = hashlib.sha256(read_bytes(name, PROMPTS_BYTES)).hexdigest()
    return hashes


@contextmanager
def replaced_folder(target: Path, *, marker: str) -> Iterator[Path]:
    """Yield a new folder to fill, which becomes `target` if the block succeeds.

    An existing `target` is replaced only if it is empty or holds the file `marker` (it is then ours);
    otherwise UserError. Of two concurrent writers, the last to finish wins.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):
        _require_ours(target, marker)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        scratch.chmod(0o755)
        yield scratch
        with _locked(target.parent):
            _require_ours(target, marker)
            _swap(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other writers in `folder`; locking the folder itself leaves no file behind."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _require_ours(folder: Path, marker: str) -> None:
    if not folder.exists():
        return
    if folder.is_dir() and ((folder / marker).is_file() or not any(folder.iterdir())):
        return
    raise UserError(
        "exists and was not written by this command",
        where=str(folder),
        mend="choose another folder, or remove this one",
    )


def _swap(scratch: Path, target: Path) -> None:
    """Rename `scratch` to `target`, moving old contents away at the last moment."""
    if not target.exists():
        scratch.rename(target)
        return
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-old-"))
    try:
        target.rename(old)
        scratch.rename(target)
    finally:
        shutil.rmtree(old, ignore_errors=True)
