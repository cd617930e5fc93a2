"""What moves the bytes of page files between open files and memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

from rayk.offload.page_file import Bytes
from rayk.types.errors import DeviceError

FileParts = tuple[int, Sequence[Bytes]]
"""A file descriptor, and memory for what stands in that file one part after the other, from its start."""


class PageStore(Protocol):
    """One thread uses a store at a time. Files are opened, renamed and closed by others."""

    @property
    def name(self) -> str:
        """For people."""

    def write(self, files: Sequence[FileParts]) -> None:
        """Write every part. Raises OSError, with the system's errno, unless all bytes were taken."""

    def read(self, files: Sequence[FileParts]) -> None:
        """Fill every part. A file that ends early leaves the rest as it was: its reader checks digests.

        Raises OSError.
        """

    def close(self) -> None:
        """Let go of what it holds."""


class PlainFiles:
    """System calls, one file after the other. They release the interpreter while the disk works."""

    @property
    def name(self) -> str:
        """See PageStore."""
        return "plain files"

    def write(self, files: Sequence[FileParts]) -> None:
        """See PageStore."""
        for descriptor, parts in files:
            done, total = os.pwritev(descriptor, list(parts), 0), sum(p.nbytes for p in parts)
            if done < total:
                _write_rest(descriptor, b"".join(p.tobytes() for p in parts), done)

    def read(self, files: Sequence[FileParts]) -> None:
        """See PageStore."""
        for descriptor, parts in files:
            os.preadv(descriptor, list(parts), 0)

    def close(self) -> None:
        """See PageStore."""


def open_store() -> PageStore:
    """NIXL's POSIX backend where it works, plain files elsewhere."""
    from rayk.transfer.nixl_files import NixlFiles

    try:
        return NixlFiles()
    except DeviceError as error:
        logging.getLogger("rayk").info("pages on disk go through plain files: %s", error.problem)
        return PlainFiles()


def _write_rest(descriptor: int, data: bytes, done: int) -> None:
    """The system took only some bytes, because of a signal or a full disk: the next call says which."""
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], done)
