"""The signals that end a server: the first in order, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Whether somebody asked this process to end. Of the main thread."""

    def __init__(self, on_first: Callable[[], None], at_once: Callable[[], None] = lambda: None) -> None:
        """`at_once`: what must be done still before a second signal ends the process."""
        self._on_first = on_first
        self._at_once = at_once
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.received = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within the block a first signal calls `on_first` and sets the event; a second ends the process.

        A process that ends so leaves nothing: what it started ends by itself (see actors.sessions).
        """
        assert threading.current_thread() is threading.main_thread()
        before = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def event(self) -> asyncio.Event:
        """An event of the running loop that a signal sets, or has set."""
        event = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), event
        if self.received:
            event.set()
        return event

    def end_within(self, timeout_s: float, code: int) -> None:
        """End the process then, whatever still waits, as a second signal would."""

        def end() -> None:
            self._at_once()
            os._exit(code)

        timer = threading.Timer(timeout_s, end)
        timer.daemon = True
        timer.start()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.received:
            self._at_once()
            os._exit(128 + signum)
        self.received = True
        self._on_first()
        if self._waiting is not None:
            loop, event = self._waiting
            loop.call_soon_threadsafe(event.set)  # a handler alone does not wake a loop that sleeps
