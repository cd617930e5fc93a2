"""Folders of the local clusters that runs start for themselves, and what killed runs left of them.

Ray keeps a cluster's sockets and logs in a folder below the temporary directory. A run holds a lock in its
folder; the kernel frees that lock when the run ends, however it ends. A folder with our mark and a free lock
belongs to a run that was killed. Its processes are left alone, because they end by themselves: Linux kills
the GCS and the raylet together with the process that started them, workers follow the raylet, and Ray's two
agents give up about a minute later.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "rayk-"
MARK = "rayk.lock"
_own: set[Path] = set()
"""Marks of this process."""


@contextmanager
def session_folder() -> Iterator[str]:
    """Make a new folder for a local cluster, and remove it at the end; folders of killed runs are removed
    first."""
    remove_dead_sessions()
    # Unix socket paths are short: the folder lives right below the temporary directory.
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Locked before it has its name: nobody ever sees a mark of a living run without a lock.
        fcntl.flock(handle, fcntl.LOCK_EX)
        (folder / "new").rename(folder / MARK)
        _own.add(folder / MARK)
        # Ray opens what it is given to all users: it lies in a folder that is closed to them.
        inner = folder / "ray"
        inner.mkdir()
        yield str(inner)
    finally:
        _own.discard(folder / MARK)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_own_sessions() -> None:
    """Remove this process's folders as it ends at once. Its cluster may still write, so files that cannot be
    removed are left."""
    for mark in tuple(_own):
        with suppress(OSError):
            _remove(mark)


def remove_dead_sessions() -> list[Path]:
    """Remove the folders of this user's killed runs; returns them."""
    removed = []
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        try:
            if mark.stat().st_uid != os.getuid():
                continue
            handle = os.open(mark, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it is being removed
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if mark.exists():
                _remove(mark)
                removed.append(mark.parent)
        except OSError:
            pass  # its run is alive
        finally:
            os.close(handle)
    return removed


def _remove(mark: Path) -> None:
    """Remove a folder, its mark last, so that a partly removed folder keeps its mark."""
    folder = mark.parent
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path != mark:
            path.unlink(missing_ok=True)
    if [p.name for p in folder.iterdir()] == [MARK]:
        shutil.rmtree(folder, ignore_errors=True)
