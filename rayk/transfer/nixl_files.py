"""Files through NIXL's POSIX backend: many reads or writes of open files under way at once.

The backend's POSIX AIO queue is not used: after one error all its later transfers fail, and the error is told
while other reads of the same transfer still write into memory.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from errno import EIO

import numpy as np
from numpy.typing import NDArray

from rayk.transfer.nixl_agent import nixl_api, nixl_errors
from rayk.types.errors import DeviceError

_QUEUES = {"io_uring": "use_uring", "Linux AIO": "use_aio"}
"""What people call it -> the backend's option. The first that starts is used: some places forbid io_uring."""
_MAX_FILES = 256
"""In one transfer."""
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_COUNT = itertools.count()

Parts = tuple[int, Sequence[NDArray[np.uint8]]]
"""A file descriptor, and memory for what stands in that file one part after the other, from its start."""


class NixlFiles:
    """Reads and writes whole files (rayk.offload.page_store.PageStore) by way of a buffer of its own.

    After a failed transfer it raises for ever: parts of that transfer may still be under way, so all that it
    uses is kept as it is. Raises DeviceError when NIXL or its POSIX backend cannot be used.
    """

    def __init__(self) -> None:
        self._failure = ""
        self._buffer = np.zeros(0, np.uint8)
        self._name = f"files-{os.getpid()}-{next(_COUNT)}"
        self._start()

    def _start(self) -> None:
        api = nixl_api()
        self._nixl = api.nixl_agent(self._name, api.nixl_agent_config(backends=[], enable_prog_thread=False))
        problems = []
        for queue, option in _QUEUES.items():
            try:
                self._nixl.create_backend("POSIX", {option: "true", "ios_pool_size": str(_MAX_FILES)})
            except nixl_errors() as error:
                problems.append(f"{queue}: {error!r}")
                continue
            self._queue = queue
            return
        raise DeviceError(
            "NIXL's POSIX backend does not start (" + "; ".join(problems) + ")",
            mend="use plain files",
        )

    @property
    def name(self) -> str:
        """Backend and queue, or what is wrong with it."""
        return f"nixl/POSIX ({self._failure or self._queue})"

    def write(self, files: Sequence[Parts]) -> None:
        """Write every part. Raises OSError (EIO) unless all bytes were taken."""
        places = self._place(files)
        for (_, parts), place in zip(files, places, strict=True):
            np.concatenate(parts, out=place)
        self._move("WRITE", files, places)

    def read(self, files: Sequence[Parts]) -> None:
        """Fill every part. Raises OSError (EIO), also where a file is too short."""
        places = self._place(files)
        self._move("READ", files, places)
        for (_, parts), place in zip(files, places, strict=True):
            at = 0
            for part in parts:
                part[:] = place[at : at + part.nbytes]
                at += part.nbytes

    def close(self) -> None:
        """Let go of the buffer, unless something may still write into it."""
        if not self._failure and self._buffer.nbytes:
            self._nixl.deregister_memory(self._registered)
            self._buffer = np.zeros(0, np.uint8)

    def _place(self, files: Sequence[Parts]) -> list[NDArray[np.uint8]]:
        """Memory for each file's bytes, in the buffer."""
        if self._failure:
            raise OSError(EIO, self._failure)
        assert len(files) <= _MAX_FILES, len(files)
        ends = np.cumsum([0, *(sum(p.nbytes for p in parts) for _, parts in files)]).tolist()
        if ends[-1] > self._buffer.nbytes:
            self.close()
            self._buffer = np.zeros(ends[-1], np.uint8)
            self._registered = self._nixl.register_memory(
                [(self._buffer.ctypes.data, self._buffer.nbytes, 0, "")], "DRAM"
            )
        return [self._buffer[start:end] for start, end in itertools.pairwise(ends)]

    def _move(self, operation: str, files: Sequence[Parts], places: list[NDArray[np.uint8]]) -> None:
        if not files:
            return
        kept: list[object] = []
        try:
            regions = [(0, place.nbytes, fd, "") for (fd, _), place in zip(files, places, strict=True)]
            opened = self._nixl.register_memory(regions, "FILE")
            local = self._nixl.get_xfer_descs([(p.ctypes.data, p.nbytes, 0) for p in places], "DRAM")
            handle = self._nixl.initialize_xfer(operation, local, opened.trim(), self._name)
            kept += [opened, local, handle]
            self._wait(handle)
            self._nixl.release_xfer_handle(handle)
            self._nixl.deregister_memory(opened)
        except nixl_errors() as error:
            self._failure, self._kept = f"failed: {error!r}", kept
            raise OSError(EIO, self._failure) from error

    def _wait(self, handle: object) -> None:
        """Until all is done; the bindings raise where it failed."""
        state = self._nixl.transfer(handle)
        pause = _FIRST_PAUSE_S
        while state != "DONE":
            if state != "PROC":
                raise nixl_api().nixlBind.nixlBackendError(state)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            state = self._nixl.check_xfer_state(handle)
