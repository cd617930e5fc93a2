"""Write a run's files atomically, and let one writer at a time into its folder."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rayk.types.errors import UserError
from rayk.types.files import check_nesting, read_text

TABLES = ("cells", "requests", "transfers")
STEPS = "steps"
"""A table that only runs with `record_steps` have."""
LOCK = ".lock"
SPEC_BYTES = 4 << 20
MAX_SPEC_ITEMS = 100_000  # twice those of a spec that is run, whose defaults are written out: 2 s and 100 MB
_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` once the block ends well and its bytes are on the device,
    so neither a kill nor a power cut leaves half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except FileNotFoundError as error:  # a folder that takes no files, as /proc/self, or is gone
        raise UserError(f"cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class _BoundedLoader(yaml.SafeLoader):
    """Reads a limited number of items and no merge keys: no run writes any, and they may expand beyond
    memory."""

    num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.num_nodes += 1
        if self.num_nodes > MAX_SPEC_ITEMS:
            raise ValueError(f"more than {MAX_SPEC_ITEMS:,} items")
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leave merge keys where they are."""


def parse_spec(text: str, where: str = "spec.yaml") -> dict[str, Any]:
    """Parse a run's spec.yaml; empty text gives an empty mapping. Raises UserError."""
    try:
        found = yaml.load(text, _BoundedLoader)  # noqa: S506 - a SafeLoader
        check_nesting(found, MAX_SPEC_ITEMS)
    except RecursionError as error:
        raise UserError("not a run's spec: nested too deep", where=where) from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        problem = f"not a run's spec: {error}"
        raise UserError(problem, where=where) from error
    if found is not None and not isinstance(found, dict):
        raise UserError("not a run's spec: no mapping", where=where)
    return found or {}


def read_spec(path: Path) -> str:
    """Read a run's spec.yaml, checked by `parse_spec`; empty where there is none. Raises UserError."""
    if not path.exists():
        return ""
    try:
        text = read_text(path, SPEC_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from error
    parse_spec(text, str(path))
    return text


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed writers. Call with the folder locked."""
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _is_alive_elsewhere(int(match.group(1))):
            path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder unless it is there. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(problem=f"cannot create {folder}: {error.strerror}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and keep other runs out. Raises UserError naming the run that holds it. The kernel frees
    the lock with the process, so no lock is ever stale."""
    make_folder(folder)
    handle = _open_lock(folder)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        # Unlinked while held: who opens the old file now finds that it is no longer the folder's.
        (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)


def _open_lock(folder: Path) -> int:
    path = folder / LOCK
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError as error:
            raise UserError(f"cannot write here: {error.strerror}", where=str(folder)) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 200, 0).decode(errors="replace")
            os.close(handle)
            raise UserError(
                problem=f"another run is writing here ({holder or 'just started'})",
                where=str(folder),
                mend="wait for it, or another --out",
            ) from error
        except OSError:
            return handle  # a file system without locks: nobody can be kept out
        if _is_same_file(handle, path):
            return handle
        os.close(handle)


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _is_alive_elsewhere(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
