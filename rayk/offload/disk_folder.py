"""The folder of a disk tier: whose it is, its secret, and the pages that an earlier process left there.

    <folder>/secret                32 bytes, made once: the same tokens have the same keys after a restart
    <folder>/<identity>/lock       held by the one process that uses the subfolder
    <folder>/<identity>/identity.json
    <folder>/<identity>/g0-<key>.page

A second process that wants the same subfolder is refused, rather than given one of its own: pages in a folder
that nobody opens again are never found, and two owners of one folder would both count its capacity. Pages
tell what prompts said, so everything here is readable by its user only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rayk.offload.page_file import HEADER_BYTES, PageIdentity, PageName, parse_file_name
from rayk.types.errors import DiskUnavailable, UserError

SECRET_BYTES = 32
_TEMPORARY = ".writing-"  # how names of files begin that are not whole yet
_LOCK_WAIT_S = 0.5
_MEND = "give an existing folder on a disk with room, writable by this user"
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_OF_THE_DISK = _READ_ONLY | {errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""What the machine is to blame for, whatever was asked."""


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A file with a page's name. Nobody has looked inside yet."""

    name: PageName
    num_bytes: int  # of the file


class DiskFolder:
    """Opens, or makes, the subfolder for pages of one identity, and locks it.

    Raises UserError when the folder is missing or in use, DiskUnavailable when it can neither be written nor
    read. Where it can be read only, `why_read_only` says why; pages that are there can be read.
    """

    def __init__(self, folder: Path, identity: PageIdentity) -> None:
        if not folder.is_dir():
            raise UserError("the disk tier's folder does not exist", str(folder), f"mkdir -p {folder}")
        self._identity = identity
        self.path = folder / identity.folder_name
        self._count = 0
        with _user_errors(folder):
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock, self.why_read_only = _take(self.path)
            try:
                self.num_leftovers = 0 if self.why_read_only else self._remove_leftovers()
                self.secret = self._find_secret(folder / "secret")
                identity_file = self.path / "identity.json"
                if not (identity_file.exists() or self.why_read_only):
                    _write_whole(identity_file, identity.text.encode(), self.new_temporary(), os.replace)
                self.block_bytes = os.statvfs(self.path).f_bsize
            except BaseException:
                os.close(self._lock)
                raise

    def disk_bytes(self, group: int) -> int:
        """A file of a page takes whole blocks of the disk."""
        return self._on_disk(HEADER_BYTES + self._identity.page_bytes[group])

    def _on_disk(self, num_bytes: int) -> int:
        return -(-num_bytes // self.block_bytes) * self.block_bytes

    def file(self, name: PageName) -> str:
        return f"{self.path}/{name.file_name}"

    def new_temporary(self) -> str:
        """Tell where a file may be written until it is whole. Never the same twice."""
        self._count += 1
        return f"{self.path}/{_TEMPORARY}{self._count}"

    def find(self) -> list[FoundPage]:
        """List pages by when they were last used, the oldest first. Names and lengths only are looked
        at."""
        found = []
        with _user_errors(self.path), os.scandir(self.path) as entries:
            for entry in entries:
                name = parse_file_name(entry.name)
                if name is None or not entry.is_file(follow_symlinks=False):
                    continue
                facts = entry.stat(follow_symlinks=False)
                found.append((facts.st_mtime_ns, entry.name, FoundPage(name, facts.st_size)))
        found.sort(key=lambda row: row[:2])
        return [page for _, _, page in found]

    def unused_bytes(self) -> int:
        """Return what pages of other identities take that no process has open: nobody evicts them.

        They are another model's, or of the same one under another version or format: for people to remove.
        """
        total = 0
        with suppress(OSError):
            for other in self.path.parent.iterdir():
                if other.is_dir() and (other / "lock").exists() and _is_free(other):
                    total += sum(self._on_disk(e.stat().st_size) for e in os.scandir(other))
        return total

    def release(self) -> None:
        os.close(self._lock)

    def _find_secret(self, path: Path) -> bytes:
        """Read it, or make it: processes that do so at once all get the same."""
        if not path.exists():
            # Linking fails where another process was faster; replacing would not.
            _write_whole(path, secrets.token_bytes(SECRET_BYTES), self.new_temporary(), os.link)
        found = path.read_bytes()
        if len(found) != SECRET_BYTES:
            raise UserError(
                f"the secret of the stored pages' keys has {len(found)} bytes instead of {SECRET_BYTES}",
                str(path),
                "remove it: a new one is made, and no page that is stored there is found any more",
            )
        return found

    def _remove_leftovers(self) -> int:
        """Remove files that a process did not finish. It is gone, since the lock is ours."""
        leftovers = [entry.path for entry in os.scandir(self.path) if entry.name.startswith(_TEMPORARY)]
        for path in leftovers:
            Path(path).unlink()
        return len(leftovers)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it. Raises UserError, DiskUnavailable."""
    with _user_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _user_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = DiskUnavailable if error.errno in _OF_THE_DISK else UserError
        where = error.filename or str(folder)
        raise kind(f"it cannot be used for pages: {error.strerror}", str(where), _MEND) from error


def _open_lock(folder: Path) -> tuple[int, str]:
    """Open a descriptor, and say why it and all that lies beside it can only be read; "" where it can be
    written."""
    try:
        return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), ""
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        try:
            return os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC), error.strerror or str(error)
        except OSError:
            raise error from None


def _take(folder: Path) -> tuple[int, str]:
    """Open and lock; the system lets go of the lock when this process ends, however it ends."""
    descriptor, why_read_only = _open_lock(folder)
    try:
        _wait_for_lock(descriptor)
        # For people; a full disk may have no room for it.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace")
        os.close(descriptor)
        raise UserError(
            f"the disk tier's pages are in use by process {owner}",
            str(folder),
            "give each server a folder of its own, or wait until that one has ended",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, why_read_only


def _wait_for_lock(descriptor: int) -> None:
    """Raises BlockingIOError when another process keeps it: one that is ending, or only asks, does not."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_WAIT_S / 20)
        else:
            return


def _is_free(folder: Path) -> bool:
    """Tell whether no process holds the lock. It is not taken for longer than it takes to ask."""
    descriptor = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _write_whole(path: Path, data: bytes, temporary: str, place: Callable[[str, Path], None]) -> None:
    """Write a small file that is there as a whole, also after a power cut, or not at all."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
        with suppress(FileExistsError):
            place(temporary, path)
    finally:
        os.close(descriptor)
        Path(temporary).unlink(missing_ok=True)
    parent = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
