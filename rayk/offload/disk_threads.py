"""What waits for the disk, in threads, so that nobody else does.

Nothing is synced: pages can be computed again, and after a power cut a page that the disk never got is found
wrong by its digest. A process that is killed loses nothing that was renamed into place.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
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
from typing import Any

import numpy as np

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
from rayk.offload.page_store import FileParts, PageStore, PlainFiles

TRANSIENT = frozenset({EMFILE, ENFILE, ENOMEM, EINTR, EAGAIN})
"""errno values that say nothing about the disk."""
IN_THE_WAY = frozenset({EISDIR})
"""Those by which one page cannot be written: something stands in its place."""
ODD_FILE = IN_THE_WAY | {EACCES, ELOOP, ENXIO, EPERM, ESPIPE}
"""Those by which one page cannot be read or removed: its file is not a plain one, or not this user's."""
_MAX_JOBS = 32
_MAX_BYTES = 16 << 20
"""Of pages that are written or read together."""
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """A page to write or to read, and where."""

    name: PageName
    page: Bytes
    file: str
    owner: Any
    """Whatever the tier wants back with the result."""

    @property
    def num_bytes(self) -> int:
        """Of the page."""
        return self.page.nbytes


@dataclass(frozen=True, eq=False, slots=True)
class Removal:
    """A file to remove."""

    file: str
    num_bytes: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Uses:
    """When pages were last used, for the process that finds them: files, and time.time_ns."""

    times: Sequence[tuple[str, int]]
    num_bytes: int = 0


Work = Callable[[list[Any]], Sequence[Any]]


class Workers:
    """Threads that take jobs from one queue, several at once, in order.

    works: what each thread does with some jobs; it returns a result for each. An exception is everybody's.
    results: where (job, result) is put, for whoever owns the jobs.
    """

    def __init__(self, name: str, works: Sequence[Work], results: deque[tuple[Any, Any]]) -> None:
        self._jobs: deque[Any] = deque()
        self._changed = threading.Condition()
        self._stop_at: float | None = None
        self._results = results
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"{name}-{i}", daemon=True)
            for i, work in enumerate(works)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, jobs: Sequence[Any]) -> None:
        """Have these done, after what was posted before."""
        with self._changed:
            self._jobs.extend(jobs)
            self._changed.notify(len(jobs))

    def stop(self, deadline: float) -> bool:
        """Take no new job after this time (time.monotonic), and wait so long. Whether all threads ended."""
        with self._changed:
            self._stop_at = deadline
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, work: Work) -> None:
        while jobs := self._next():
            try:
                done = work(jobs)
            except Exception as error:  # noqa: BLE001 - the owner hears of it; a dead thread would hang it
                done = [error] * len(jobs)
            self._results.extend(zip(jobs, done, strict=True))

    def _next(self) -> list[Any]:
        """Jobs, or none at the end."""
        with self._changed:
            while not self._jobs and self._stop_at is None:
                self._changed.wait()
            if self._stop_at is not None and time.monotonic() >= self._stop_at:
                return []
            jobs: list[Any] = []
            num_bytes = 0
            share = min(_MAX_JOBS, -(-len(self._jobs) // len(self._threads)))
            while self._jobs and len(jobs) < share and num_bytes < _MAX_BYTES:
                jobs.append(self._jobs.popleft())
                num_bytes += jobs[-1].num_bytes
            return jobs


class Writing:
    """The writer thread's work. A result is None, or the error for which the page is not there.

    A page is written beside its place and renamed, so that a file with a page's name is whole. After an error
    of the disk nothing is written any more: a full disk stays full, and each attempt may take long.
    """

    def __init__(self, folder: DiskFolder, identity: PageIdentity, store: PageStore) -> None:
        self._folder = folder
        self._identity = identity
        self._store = store
        self._plain = PlainFiles()
        self._error: OSError | None = None

    def __call__(self, jobs: list[Job | Removal | Uses]) -> list[OSError | None]:
        """In the order of the jobs: a removal makes room for the writes behind it."""
        results: list[OSError | None] = []
        pages: list[Job] = []
        for job in jobs:
            if isinstance(job, Job):
                pages.append(job)
                continue
            results += self._write(pages)
            pages = []
            if isinstance(job, Removal):
                results.append(_remove(job.file))
            else:
                _note_uses(job)
                results.append(None)
        return results + self._write(pages)

    def _write(self, jobs: list[Job]) -> list[OSError | None]:
        if self._error is None and jobs:
            with suppress(OSError):
                self._write_together(self._store, jobs)
                return [None] * len(jobs)
        # One by one, with plain calls: what fits is kept, and the system says what is wrong with the rest.
        return [self._write_alone(job) for job in jobs]

    def _write_alone(self, job: Job) -> OSError | None:
        if self._error is None:
            try:
                self._write_together(self._plain, [job])
            except OSError as error:
                if error.errno in TRANSIENT or error.errno in IN_THE_WAY:
                    return error
                self._error = error
        return self._error

    def _write_together(self, store: PageStore, jobs: list[Job]) -> None:
        with ExitStack() as stack:
            files: list[FileParts] = []
            temporaries = []
            for job in jobs:
                temporary = self._folder.new_temporary()
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
                stack.callback(_remove, temporary)  # Finds nothing where the file was renamed.
                stack.callback(os.close, descriptor)
                files.append((descriptor, (make_header(self._identity, job.name, job.page), job.page)))
                temporaries.append(temporary)
            store.write(files)
            for job, temporary, (descriptor, parts) in zip(jobs, temporaries, files, strict=True):
                if os.fstat(descriptor).st_size != sum(p.nbytes for p in parts):
                    raise OSError(EIO, "fewer bytes were written than given", temporary)
                Path(temporary).rename(job.file)


def _remove(file: str) -> OSError | None:
    try:
        Path(file).unlink(missing_ok=True)
    except OSError as error:
        # What somebody put in a page's place is theirs; a folder that takes nothing is met when one writes.
        return error if error.errno not in ODD_FILE else None
    return None


def _note_uses(uses: Uses) -> None:
    for file, used_at in uses.times:
        # It may be gone; a read-only disk does not take it.
        with suppress(OSError):
            os.utime(file, ns=(used_at, used_at), follow_symlinks=False)


class Reading:
    """A reader thread's work. A result is "", the reason why it is not the page, or the system's error."""

    def __init__(self, identity: PageIdentity, store: PageStore) -> None:
        self._identity = identity
        self._store = store
        self._plain = PlainFiles()

    def __call__(self, jobs: list[Job]) -> list[str | OSError]:
        """In the order of the jobs."""
        results: list[str | OSError] = [""] * len(jobs)
        opened: dict[int, FileParts] = {}
        with ExitStack() as stack:
            for i, job in enumerate(jobs):
                try:
                    descriptor = os.open(job.file, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
                    stack.callback(os.close, descriptor)
                    results[i] = self._check_length(job, descriptor)
                except OSError as error:
                    results[i] = MISSING if isinstance(error, FileNotFoundError) else error
                if results[i] == "":
                    opened[i] = (descriptor, (np.zeros(HEADER_BYTES, np.uint8), job.page))
            failed = self._read(list(opened.values()))
            for (i, file), error_or_none in zip(opened.items(), failed, strict=True):
                results[i] = error_or_none or self._check(jobs[i], file)
        return results

    def _check_length(self, job: Job, descriptor: int) -> str:
        num_bytes = os.fstat(descriptor).st_size
        header = b""
        if num_bytes != HEADER_BYTES + self._identity.page_bytes[job.name.group]:
            header = os.pread(descriptor, HEADER_BYTES, 0)
        return check_length(self._identity, job.name, num_bytes, header)

    def _read(self, files: list[FileParts]) -> list[OSError | None]:
        with suppress(OSError):
            if files:
                self._store.read(files)
            return [None] * len(files)
        return [self._read_alone(file) for file in files]

    def _read_alone(self, file: FileParts) -> OSError | None:
        try:
            self._plain.read([file])
        except OSError as error:
            return error
        return None

    def _check(self, job: Job, file: FileParts) -> str:
        _, (header, page) = file
        return check_page(self._identity, job.name, header.tobytes(), page)
