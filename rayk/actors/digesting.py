"""Digests of what an engine's rank stores, made beside its steps: by one thread, one after the other.

Blocks that are stored are full, or of requests that are over: nobody writes their rows any more, so that
steps go on meanwhile. Kernels and numpy leave the interpreter to the loop while they compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rayk.actors.commands import TicketPart


class Digesting:
    """Begun, and taken when they are done; the loop's thread calls both. The thread begins with the first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._made: deque[tuple[str, Future[TicketPart]]] = deque()

    def begin(self, name: str, digest: Callable[[], TicketPart]) -> None:
        """Digest something that is called so."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rayk-digest")
        self._made.append((name, self._pool.submit(digest)))

    def take(self) -> tuple[tuple[str, TicketPart], ...]:
        """Those that are done since the last call, in order. Raises what one of them raised."""
        if not self._made:
            return ()
        done = []
        while self._made and self._made[0][1].done():
            name, future = self._made.popleft()
            done.append((name, future.result()))
        return tuple(done)

    def close(self) -> None:
        """Wait for the one that is being made; the others are not."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._made.clear()
