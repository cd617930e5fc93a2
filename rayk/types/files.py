"""Read files that users name: plain ones (others may never end), of bounded size and depth. Keep files of
rayk's own: where a user's caches lie, whose files are trusted, and how they are written."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

JSON_BYTES = 48 << 20  # the largest of released models (a tokenizer's, a header's) take 35 MB
PROMPTS_BYTES = 128 << 20  # largest file of prompts, or trace
MAX_DEPTH = 64  # released configs have 4 levels
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_cache(name: str) -> Path:
    """Return the folder `name` of what rayk keeps for this user between runs, and can make again. It may be
    missing. See the XDG Base Directory Specification."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "rayk" / name


def open_plain(path: str | Path) -> BinaryIO:
    """Open a plain file. Raises OSError, also where it is none."""
    # A pipe without a writer would have us wait for one.
    file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a plain file", str(path))


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Read a plain file of at most `max_bytes`. Raises OSError."""
    with open_plain(path) as file:
        found = file.read(max_bytes + 1)
        size = max(len(found), os.fstat(file.fileno()).st_size)
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"{size:,} bytes, and at most {max_bytes:,} are read", str(path))
    return found


def read_own(path: Path, max_bytes: int) -> bytes:
    """Read a plain file that this user owns and nobody else may write to. Raises OSError, ValueError."""
    with open_plain(path) as file:
        of = os.fstat(file.fileno())
        if of.st_uid != os.geteuid() or of.st_mode & OTHERS_WRITE:
            raise ValueError("another user owns it, or may write to it")
        if of.st_size > max_bytes:
            raise ValueError(f"it has {of.st_size:,} bytes, and at most {max_bytes:,} are read")
        return file.read()


def read_text(path: str | Path, max_bytes: int) -> str:
    """Read UTF-8 as `read_bytes` does. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path, max_bytes).decode()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) that readers see whole or not at all. Raises OSError, and leaves nothing
    then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also where it nests deeper than MAX_DEPTH."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    check_nesting(found)
    return found


def check_nesting(value: Any, max_items: int = JSON_BYTES) -> None:
    """Raise ValueError for lists and mappings deeper than MAX_DEPTH (one may hold itself), or with more than
    `max_items` at one depth (one may be in several places)."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [x for x in level if isinstance(x, dict | list)]
        if sum(map(len, level)) > max_items:
            raise ValueError(f"more than {max_items:,} items, written out")
        level = [child for x in level for child in (x.values() if isinstance(x, dict) else x)]
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
