"""Report waits that last: what is waited for, for how long, and whether the machine is busy."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

PAUSES_S = (10.0, 20.0, 30.0, 60.0)  # before each line about one wait; the last one for all that follow


T = TypeVar("T")


def get_within(inbox: queue.SimpleQueue[T], timeout_s: float) -> T:
    """Get an item, waiting so long at most; for queues with one reader. Raises queue.Empty.

    CPython's own `get(timeout)` may wait for ever: where it takes the queue's lock at once and its thread is
    then not run until the time is over, what is left is negative, which means no limit. An empty look takes
    that lock before.
    """
    try:
        return inbox.get_nowait()
    except queue.Empty:
        if timeout_s <= 0:
            raise
    return inbox.get(timeout=timeout_s)


def busy() -> dict[str, str]:
    """Describe a busy machine for the detail of a DeadlineExceeded; empty otherwise."""
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    return {"load": f"{load:.1f} on {num_cores} cores"} if load > num_cores else {}


class Waiting:
    """Reports one wait after another, as far as they last."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Take `say`, which is called from a thread of its own."""
        self._say = say
        self._over = threading.Event()

    def begin(self, what: str) -> None:
        """Begin a wait; the one before is over."""
        self.end()
        self._over = threading.Event()
        threading.Thread(target=self._tell, args=(what, self._over), name="waiting", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def _tell(self, what: str, over: threading.Event) -> None:
        waited_s = 0.0
        for number in itertools.count():
            pause_s = PAUSES_S[min(number, len(PAUSES_S) - 1)]
            if over.wait(pause_s):
                return
            waited_s += pause_s
            more = "".join(f"; the machine is busy: {name} {value}" for name, value in busy().items())
            self._say(f"{what}: {waited_s:.0f} s so far{more}")


@contextmanager
def waiting(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report the wait that the block is, should it last."""
    wait = Waiting(say)
    wait.begin(what)
    try:
        yield
    finally:
        wait.end()
