"""Ctrl-C and SIGTERM: the first ends a run in order, a second at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """130 for Ctrl-C, 143 for SIGTERM, as shells count."""
    return 128 + getattr(interrupt, "signum", signal.SIGINT)


@contextmanager
def interrupts(on_first: Callable[[], None], at_once: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within the block the first signal calls `on_first` and raises Interrupted; the next calls `at_once` and
    ends the process.

    A process that ends so leaves its tables whole, and what it started ends by itself (see actors.sessions).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        del frame
        received.append(signum)
        if len(received) > 1:
            at_once()
            os._exit(128 + signum)
        on_first()
        raise Interrupted(signum)

    before = {signum: signal.signal(signum, handle) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
