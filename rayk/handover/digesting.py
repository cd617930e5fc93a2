"""Digests of what an engine's rank stores, made beside its steps: by one thread, one after the other.

Blocks that are stored are full, or of requests that are over: nobody writes their rows any more, so that
steps go on meanwhile. Kernels and numpy leave the interpreter to the loop while they compute.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rayk.handover.commands import TicketPart

LOG = logging.getLogger(__name__)


class Digesting:
    """Begun, and taken when they are done; the loop's thread calls both. The thread begins with the first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._made: deque[tuple[str, Future[TicketPart]]] = deque()

    def begin(self, name: str, digest: Callable[[], TicketPart]) -> None:
        """Digest something that is called so."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rayk-digest")
        try:
            future = self._pool.submit(digest)
        except RuntimeError as error:  # there is no thread to be had
            self._pool, future = None, Future()
            future.set_exception(error)
        self._made.append((name, future))

    def take(self) -> tuple[tuple[tuple[str, TicketPart], ...], tuple[tuple[str, str], ...]]:
        """Return those that are done since the last call, in order: what was made, and what could not be made
        and why. A store may fail (there was no memory for it, say): the engine goes on, and whoever reads its
        log finds the stack there."""
        done, failed = [], []
        while self._made and self._made[0][1].done():
            name, future = self._made.popleft()
            try:
                done.append((name, future.result()))
            except Exception as error:  # whatever it is: only a store
                LOG.warning("%s could not be digested, and is not stored", name, exc_info=error)
                failed.append((name, f"{type(error).__name__}: {error}"))
        return tuple(done), tuple(failed)

    def close(self) -> None:
        """Wait for the one that is being made; the others are not."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._made.clear()
