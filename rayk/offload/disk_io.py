"""What waits for the disk: page files are written, read and removed here, in threads of the tier's pools.

Nothing is synced: pages can be computed again, and after a power cut a page that the disk never got is found
wrong by its digest. A process that is killed loses nothing that was renamed into place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from errno import (
    EACCES,
    EAGAIN,
    EINTR,
    EIO,
    EISDIR,
    ELOOP,
    EMFILE,
    ENFILE,
    ENOMEM,
    ENXIO,
    EPERM,
    ESPIPE,
)
from pathlib import Path

from rayk.offload.disk_folder import DiskFolder
from rayk.offload.page_file import (
    HEADER_BYTES,
    MISSING,
    Bytes,
    PageIdentity,
    PageName,
    check_length,
    check_page,
    make_header,
)

TRANSIENT = frozenset({EMFILE, ENFILE, ENOMEM, EINTR, EAGAIN})  # they say nothing about the disk
IN_THE_WAY = frozenset({EISDIR})  # something stands in one page's place, which cannot be written
ODD_FILE = IN_THE_WAY | {EACCES, ELOOP, ENXIO, EPERM, ESPIPE}
"""Those by which one page cannot be read or removed: its file is not a plain one, or not this user's."""
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class PageFiles:
    """The page files of one folder. One thread writes and removes; any number may read."""

    def __init__(self, folder: DiskFolder, identity: PageIdentity) -> None:
        self._folder = folder
        self._identity = identity
        self._disk_error: OSError | None = None

    def write(self, name: PageName, page: Bytes) -> None:
        """Write beside the page's place, then rename: a file with a page's name is whole.

        Raises OSError if the page is not there. After an error of the disk itself nothing is written any
        more, and it is raised again: a full disk stays full, and each attempt may take long.
        """
        if self._disk_error is not None:
            raise self._disk_error
        try:
            self._write(name, page)
        except OSError as error:
            if error.errno not in TRANSIENT | IN_THE_WAY:
                self._disk_error = error
            raise

    def _write(self, name: PageName, page: Bytes) -> None:
        temporary = Path(self._folder.new_temporary())
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            _write_all(descriptor, (make_header(self._identity, name, page), page))
            temporary.rename(self._folder.file(name))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(descriptor)

    def read(self, wanted: Sequence[tuple[PageName, Bytes]]) -> list[str | OSError]:
        """Fill memory with pages; for each "", the reason why its file is not the page, or the error.

        The system is told of all files before the first is read: it fetches them at once.
        """
        with ExitStack() as stack:
            opened = [self._open(name, stack) for name, _ in wanted]
            return [
                self._fill(name, page, file) if isinstance(file, int) else file
                for (name, page), file in zip(wanted, opened, strict=True)
            ]

    def _open(self, name: PageName, stack: ExitStack) -> int | str | OSError:
        """Open a descriptor that the stack closes, or say why there is none."""
        try:
            descriptor = os.open(self._folder.file(name), os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
            stack.callback(os.close, descriptor)
            with suppress(OSError):  # only advice, which some file systems refuse
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        except FileNotFoundError:
            return MISSING
        except OSError as error:
            return error
        return descriptor

    def _fill(self, name: PageName, page: Bytes, descriptor: int) -> str | OSError:
        header = bytearray(HEADER_BYTES)
        try:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes == HEADER_BYTES + page.nbytes:
                os.preadv(descriptor, [header, page], 0)
                return check_page(self._identity, name, bytes(header), page)
            return check_length(self._identity, name, num_bytes, os.pread(descriptor, HEADER_BYTES, 0))
        except OSError as error:
            return error

    def remove(self, name: PageName) -> None:
        """Raises OSError. What somebody put in a page's place is theirs, and stays."""
        try:
            Path(self._folder.file(name)).unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in ODD_FILE:
                raise

    def note_uses(self, times: Mapping[PageName, int]) -> None:
        """Keep when pages were last used (time.time_ns) for the process that finds them."""
        for name, used_at in times.items():
            # It may be gone; a read-only disk does not take it.
            with suppress(OSError):
                os.utime(self._folder.file(name), ns=(used_at, used_at), follow_symlinks=False)


def _write_all(descriptor: int, parts: Sequence[Bytes]) -> None:
    """Write parts one after the other from the file's start. Raises OSError unless all bytes were taken."""
    done = os.pwritev(descriptor, list(parts), 0)
    rest = memoryview(b"".join(p.tobytes() for p in parts) if done < sum(p.nbytes for p in parts) else b"")
    while done < len(rest):
        # A signal, or a full disk: this call says which.
        taken = os.pwrite(descriptor, rest[done:], done)
        if not taken:
            raise OSError(EIO, "fewer bytes were written than given")
        done += taken
