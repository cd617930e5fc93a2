"""The disk tier: pages in files of one folder, found again after a restart, served as they were put or not.

One thread owns a tier, calls all its methods and is never kept waiting by the disk, except while the tier
opens and closes. A disk that is full, becomes read-only or fails turns the tier off: nothing is written any
more, pages that can be read are still served. So it is with one that is read-only from the start.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rayk.offload.disk_folder import DiskFolder
from rayk.offload.disk_io import IN_THE_WAY, ODD_FILE, TRANSIENT, PageFiles
from rayk.offload.page_file import (
    FOREIGN,
    KEY_BYTES,
    MISSING,
    REASONS,
    UNREADABLE,
    Bytes,
    PageIdentity,
    PageName,
    check_length,
)
from rayk.types.errors import UserError

_LOG = logging.getLogger("rayk")

Put = Callable[[bool], None]
Got = Callable[[list[PageName]], None]
Then = Callable[[Any], None]  # takes what a thread returned, or the exception that it raised
PASSING = TRANSIENT | IN_THE_WAY
READ_TOGETHER = 32  # pages that one thread has open at once
SAVE_ORDER_S = 5.0
"""So often the order of use is written to disk, for the process that finds the pages; and at the end."""


@dataclass
class DiskCounters:
    """They count since the tier was opened. Bytes are those of pages, without headers."""

    pages_found: int = 0  # left by an earlier process
    leftovers: int = 0  # files that an earlier process did not finish
    pages_written: int = 0
    bytes_written: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    pages_evicted: int = 0
    pages_dropped: int = 0
    """Pages not taken or not written: the queue was full, everything else was in use, or the tier was off."""
    bad: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    """Pages asked for and not served, by reason."""


@dataclass(eq=False, slots=True)
class _DiskPage:
    num_readers: int = 0  # while there are some it is not evicted


@dataclass(eq=False, slots=True)
class _Get:
    names: Sequence[PageName]
    done: Got
    num_left: int = 0  # that are not read yet
    bad: list[PageName] = field(default_factory=list)


def _check_capacity(folder: Path, capacity_bytes: int, file_bytes: int) -> None:
    if capacity_bytes < file_bytes:
        problem = f"{capacity_bytes} bytes on disk hold no page, whose file takes {file_bytes}"
        raise UserError(problem, str(folder), "give the disk tier more bytes")


def status_without(why: str) -> dict[str, Any]:
    """Return the status of a disk tier that could not be opened."""
    counted = asdict(DiskCounters())
    del counted["bad"]
    sizes = dict.fromkeys(("num_pages", "num_bytes", "capacity_bytes"), 0)
    return {"state": f"off: {why}", **sizes, **counted}


class DiskTier:
    """See the module.

    folder: must exist. capacity_bytes: what page files may take, whole blocks of the disk counted.
    max_queued_bytes: of pages that wait to be written; their memory is in use so long.
    Raises UserError when the folder is missing or in use by another process, DiskUnavailable when it can
    neither be written nor read.
    """

    def __init__(
        self,
        folder: Path,
        identity: PageIdentity,
        capacity_bytes: int,
        *,
        num_readers: int = 2,
        max_queued_bytes: int = 256 << 20,
    ) -> None:
        self._identity = identity
        self._capacity = capacity_bytes
        self._max_queued = max_queued_bytes
        self._folder = DiskFolder(folder, identity)
        self._sizes = [self._folder.disk_bytes(group) for group in range(len(identity.page_bytes))]
        self._pages: OrderedDict[PageName, _DiskPage] = OrderedDict()  # the least recently used first
        self._used_at: dict[PageName, int] = {}
        """time.time_ns of pages that were used since that was written to disk last."""
        self._last_use, self._saved_at = 0, time.monotonic()
        self._writing: dict[PageName, list[Put]] = {}
        self._getting: list[_Get] = []
        self._ready: list[Callable[[], None]] = []  # completions for the next turn
        self._queued_bytes = 0
        self._used_bytes = 0
        self._why_off = self._folder.why_read_only
        self._is_slow = False
        self._closed = False
        self.counters = DiskCounters(leftovers=self._folder.num_leftovers)
        try:
            _check_capacity(folder, capacity_bytes, max(self._sizes))
            self._take_found()
            if self._why_off:
                self._warn_off()
            if unused := self._folder.unused_bytes():
                _LOG.warning("%s also holds %.1f GB of pages that no tier has open", folder, unused / 1e9)
        except BaseException:
            self._folder.release()
            raise
        self._files = PageFiles(self._folder, identity)
        self._num_readers = num_readers
        self._writer = ThreadPoolExecutor(1, "disk-write")  # in order: a removal makes room for a write
        self._readers = ThreadPoolExecutor(num_readers, "disk-read")
        self._running: dict[Future[Any], Then] = {}
        self._ended: deque[Future[Any]] = deque()
        self._make_room(0)

    @property
    def secret(self) -> bytes:
        """32 bytes of this folder, the same after a restart: a key for digests that nobody else can tell."""
        return self._folder.secret

    @property
    def state(self) -> str:
        """on, or "off: " and why nothing is written any more."""
        return f"off: {self._why_off}" if self._why_off else "on"

    @property
    def num_bytes(self) -> int:
        """What page files take, with those that are being written."""
        return self._used_bytes

    @property
    def identity(self) -> PageIdentity:
        """All pages have the same one."""
        return self._identity

    def names(self) -> tuple[PageName, ...]:
        """List pages that are there, the least recently used first."""
        return tuple(self._pages)

    def status(self) -> dict[str, Any]:
        """Tell counters and sizes, for people."""
        counted = asdict(self.counters)
        bad = {f"bad_{reason}": number for reason, number in counted.pop("bad").items() if number}
        sizes = {"num_pages": len(self), "num_bytes": self.num_bytes, "capacity_bytes": self._capacity}
        return {"state": self.state, **sizes, **counted, **bad}

    @property
    def busy(self) -> bool:
        return bool(self._writing or self._getting or self._ready)

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, name: object) -> bool:
        return name in self._pages

    def is_coming(self, name: PageName) -> bool:
        """Tell whether a page is about to be written."""
        return name in self._writing

    def touch(self, names: Iterable[PageName]) -> None:
        """Those of these that are there were used just now, the last one last."""
        for name in names:
            if name in self._pages:
                self._mark_used(name)

    def admit(self, names: Sequence[PageName], beside: Iterable[PageName]) -> int:
        """Say how many pages, the first of `names`, may be put now without any of those `beside` being
        evicted for them. The others are counted as dropped."""
        queued, used = self._queued_bytes, sum(self._sizes[name.group] for name in self._writing)
        used += sum(self._sizes[name.group] for name in {*beside} & self._pages.keys())
        for number, name in enumerate(names):
            num_bytes = self._identity.page_bytes[name.group]
            used += self._sizes[name.group]
            is_slow = queued > 0 and queued + num_bytes > self._max_queued
            if used > self._capacity or is_slow:
                self.counters.pages_dropped += len(names) - number
                self._warn_slow(is_slow)
                return number
            queued += num_bytes
        return len(names)

    def drop(self, name: PageName) -> None:
        """Nobody will ask for this page any more. One that is being read grows old instead."""
        found = self._pages.get(name)
        if found is not None and not found.num_readers:
            self._remove(name)

    def put(self, name: PageName, page: Bytes, done: Put) -> bool:
        """Write a page when the disk has time. Whether it was taken; `done` then says whether it is there.

        page: [bytes] of its group, contiguous; must not change until `done` runs.
        """
        assert len(name.key) == KEY_BYTES, len(name.key)
        assert page.shape == (self._identity.page_bytes[name.group],), page.shape
        if name in self._pages:
            self._mark_used(name)
            self._ready.append(partial(done, True))
            return True
        if name in self._writing:
            self._writing[name].append(done)
            return True
        if not self._has_room(name.group):
            self.counters.pages_dropped += 1
            return False
        self._queued_bytes += page.nbytes
        self._used_bytes += self._sizes[name.group]
        self._writing[name] = [done]
        self._submit(self._writer, partial(self._written, name, page.nbytes), self._files.write, name, page)
        return True

    def get(self, names: Sequence[PageName], into: Sequence[Bytes], done: Got) -> None:
        """Read pages; `done` gets the names of those that are bad. Their memory may hold anything.

        into: by name: [bytes] of its group, contiguous, in use until `done` runs.
        """
        call = _Get(names, done)
        there: list[tuple[PageName, Bytes, _DiskPage]] = []
        for name, page in zip(names, into, strict=True):
            assert page.shape == (self._identity.page_bytes[name.group],), page.shape
            found = None if self._closed else self._pages.get(name)
            if found is None:
                self.counters.bad[MISSING] += 1
                call.bad.append(name)
                continue
            found.num_readers += 1
            self._mark_used(name)
            there.append((name, page, found))
        if not there:
            self._ready.append(partial(done, call.bad))
            return
        call.num_left = len(there)
        self._getting.append(call)
        share = min(READ_TOGETHER, -(-len(there) // self._num_readers))
        for start in range(0, len(there), share):
            some = there[start : start + share]
            wanted = [(name, page) for name, page, _ in some]
            self._submit(self._readers, partial(self._read, call, some), self._files.read, wanted)

    def turn(self) -> None:
        """Run the completions of what has ended since the last turn. Never waits."""
        if self._used_at and time.monotonic() > self._saved_at + SAVE_ORDER_S:
            self._save_order()
        while self._ended:
            future = self._ended.popleft()
            if not future.cancelled():
                self._running.pop(future)(future.exception() or future.result())
        ready, self._ready = self._ready, []
        for complete in ready:
            complete()

    def close(self, timeout_s: float = 5.0) -> None:
        """Do what is queued, as far as the time allows, then complete everything and let go of the folder.

        A thread that the disk holds for longer is left behind; the folder is locked until the process ends.
        """
        if self._closed:
            return
        self._save_order()
        self._closed = True
        wait(self._running, timeout_s)
        for pool in (self._readers, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)
        self.turn()
        self.counters.pages_dropped += len(self._writing)
        self._ready += [partial(done, False) for waiting in self._writing.values() for done in waiting]
        self._ready += [partial(call.done, list(call.names)) for call in self._getting]
        self._writing.clear()
        self._getting.clear()
        self.turn()
        if all(future.done() for future in self._running):
            self._folder.release()

    def _submit(
        self, pool: ThreadPoolExecutor, then: Then, work: Callable[..., Any], *arguments: Any
    ) -> None:
        """Have a thread do this; a later turn tells `then` what came of it. Nothing is begun once closed."""
        if self._closed:
            return
        future = pool.submit(work, *arguments)
        self._running[future] = then
        future.add_done_callback(self._ended.append)

    def _has_room(self, group: int) -> bool:
        """Tell whether a page of this group may be written now; older ones make room on the disk."""
        queued_bytes = self._queued_bytes + self._identity.page_bytes[group]
        if self._why_off or self._closed or (self._queued_bytes and queued_bytes > self._max_queued):
            return False
        return self._make_room(self._sizes[group])

    def _make_room(self, num_bytes: int) -> bool:
        """Free so many bytes, at the cost of the least recently used pages; False if they cannot be."""
        while self._used_bytes + num_bytes > self._capacity:
            oldest = next((name for name, page in self._pages.items() if not page.num_readers), None)
            if oldest is None:
                return False
            self.counters.pages_evicted += 1
            self._remove(oldest)
        return True

    def _mark_used(self, name: PageName) -> None:
        self._pages.move_to_end(name)
        # One after the other, however coarse the clock is.
        self._last_use = self._used_at[name] = max(self._last_use + 1, time.time_ns())

    def _save_order(self) -> None:
        """Have it written when pages were used, for the process that finds them."""
        self._saved_at = time.monotonic()
        self._submit(self._writer, self._note_error, self._files.note_uses, self._used_at)
        self._used_at = {}

    def _warn_slow(self, is_slow: bool) -> None:
        if is_slow and not self._is_slow:
            self._is_slow = True
            _LOG.warning(
                "the disk at %s is too slow for all that is stored: pages are left out", self._folder.path
            )

    def _remove(self, name: PageName) -> None:
        """Forget a page; the writer removes its file before it writes what is put from now on."""
        del self._pages[name]
        self._used_bytes -= self._sizes[name.group]
        self._used_at.pop(name, None)
        self._submit(self._writer, self._note_error, self._files.remove, name)

    def _take_found(self) -> None:
        """Index what is in the folder. Files that cannot be pages by their length are removed at once."""
        for found in self._folder.find():
            name = found.name
            known = name.group < len(self._sizes)
            if reason := check_length(self._identity, name, found.num_bytes, b"") if known else FOREIGN:
                self._report(name, reason)
                with suppress(OSError):
                    Path(self._folder.file(name)).unlink()
                continue
            self._pages[name] = _DiskPage()
            self._used_bytes += self._sizes[name.group]
        self.counters.pages_found = len(self._pages)

    def _written(self, name: PageName, num_bytes: int, error: BaseException | None) -> None:
        waiting = self._writing.pop(name)
        self._queued_bytes -= num_bytes
        if error is None:
            self._pages[name] = _DiskPage()
            self.counters.pages_written += 1
            self.counters.bytes_written += num_bytes
        else:
            self._used_bytes -= self._sizes[name.group]
            self.counters.pages_dropped += 1
            self._note_error(error)
        self._ready += [partial(done, error is None) for done in waiting]

    def _read(
        self,
        call: _Get,
        wanted: Sequence[tuple[PageName, Bytes, _DiskPage]],
        results: Sequence[str | OSError] | BaseException,
    ) -> None:
        """A thread read some of a call's pages, or failed on all."""
        each = [results] * len(wanted) if isinstance(results, BaseException) else results
        for (name, page, found), result in zip(wanted, each, strict=True):
            found.num_readers -= 1
            if result == "":
                self.counters.pages_read += 1
                self.counters.bytes_read += page.nbytes
            else:
                call.bad.append(name)
                self._drop_bad(name, found, result)
        call.num_left -= len(wanted)
        if not call.num_left:
            self._getting.remove(call)
            self._ready.append(partial(call.done, call.bad))

    def _drop_bad(self, name: PageName, found: _DiskPage, result: str | BaseException) -> None:
        """A page was not served: it is as if it had never been put."""
        if self._pages.get(name) is not found:  # Somebody else's read said so before.
            self.counters.bad[MISSING] += 1
            return
        if isinstance(result, BaseException):
            self._report(name, UNREADABLE, f" ({result})")
            if isinstance(result, OSError) and result.errno in TRANSIENT:
                return
            if not isinstance(result, OSError) or result.errno not in ODD_FILE:
                self._note_error(result)
        else:
            self._report(name, result)
        self._remove(name)

    def _report(self, name: PageName, reason: str, why: str = "") -> None:
        self.counters.bad[reason] += 1
        _LOG.warning("page file %s is not used: %s%s", self._folder.file(name), reason, why)

    def _note_error(self, error: BaseException | None) -> None:
        """Write no more, unless the error will pass or is one file's. Said once."""
        if error is None or self._why_off or (isinstance(error, OSError) and error.errno in PASSING):
            return
        self._why_off = error.strerror or str(error) if isinstance(error, OSError) else repr(error)
        self._warn_off()

    def _warn_off(self) -> None:
        _LOG.warning(
            "the disk tier at %s is off: %s; what is there is still read", self._folder.path, self._why_off
        )
