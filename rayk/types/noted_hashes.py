"""Hashes of large files, computed once: each is noted in the user's cache with what a file system changes
when a file is written, and counts as long as that is the same."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rayk.types.files import JSON_BYTES, parse_json, read_own, user_cache, write_atomically

NOTED_BYTES = 64 << 20
"""Files that are smaller together take less time to hash than a note is worth."""
SETTLED_NS = 2 * 10**9
"""A tick of the coarsest clock of file systems (FAT's): two writes within one bear the same time."""

Identity = list[tuple[str, int, int, int, int]]
_known: dict[Path, tuple[Identity, str]] = {}
"""Notes of this process, by their files: a disk may take none."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return noted_hash("sha256", [path], compute)


def noted_hash(kind: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """Return what `compute` gives for `files`, from the note of an earlier call if none of them was written
    or replaced since. `kind` names the way it is computed. Raises OSError where a file is missing."""
    began_ns = time.time_ns()
    identity = _identity(files)
    if sum(size for _, _, size, _, _ in identity) < NOTED_BYTES:
        return compute()
    name = hashlib.sha256(json.dumps([kind, *(path for path, *_ in identity)]).encode()).hexdigest()[:32]
    note = user_cache("hashes") / f"{name}.json"
    found = _known.get(note) or _read(note)
    if found is not None and found[0] == identity:
        return found[1]
    digest = compute()
    _known[note] = identity, digest
    is_settled = all(max(times) + SETTLED_NS < began_ns for _, _, _, *times in identity)
    if is_settled and _identity(files) == identity:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(note, json.dumps({"files": identity, "hash": digest}))
    return digest


def _identity(files: Sequence[Path]) -> Identity:
    """List (path, inode, bytes, time of the last write, time of the last change). Users can set all but the
    last."""
    found = []
    for path in files:
        of = path.stat()
        found.append((os.path.realpath(path), of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns))
    return found


def _read(note: Path) -> tuple[Identity, str] | None:
    """Read a note, if there is one of the user's own."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        noted = parse_json(read_own(note, JSON_BYTES))
        files = [(str(p), int(a), int(b), int(c), int(d)) for p, a, b, c, d in noted["files"]]
        return files, str(noted["hash"])
    return None
