"""Handle Ctrl-C and SIGTERM: the first ends what runs in order, the second ends the process at once. Its
tables stay whole, and what it started ends by itself (see actors.sessions)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """Return 130 for Ctrl-C, 143 for SIGTERM, as shells count."""
    return 128 + getattr(interrupt, "signum", signal.SIGINT)


@contextmanager
def _handled(on_first: Callable[[int], None], at_once: Callable[[], None]) -> Iterator[None]:
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        del frame
        received.append(signum)
        if len(received) > 1:
            at_once()
            os._exit(128 + signum)
        on_first(signum)

    before = {signum: signal.signal(signum, handle) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def interrupts(on_first: Callable[[], None], at_once: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Call `on_first` and raise Interrupted at the first signal, `at_once` and end the process at the next.
    In threads other than the main one, which get no signals, nothing changes."""
    received: list[int] = []

    def interrupt(signum: int) -> None:
        received.append(signum)
        on_first()
        raise Interrupted(signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(interrupt, at_once):
        try:
            yield
        except KeyboardInterrupt as error:
            if isinstance(error, Interrupted) or not received:
                raise
            # Ray, where it waits in C++, raises a plain one in its place.
            raise Interrupted(received[0]) from error


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as asyncio.run does, but cancel it at a signal whose handler raises, and raise when it
    has ended. Raised at once, the interrupt would come up in whatever code runs just then, and be lost:
    aiohttp takes any BaseException in its callbacks for a broken connection."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    return asyncio.run(_cancelled_by_signals(coroutine))


async def _cancelled_by_signals(coroutine: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    raised: list[KeyboardInterrupt] = []
    handlers = {int(number): at for number in SIGNALS if callable(at := signal.getsignal(number))}

    def handle(signum: int, frame: FrameType | None) -> None:
        try:
            handlers[signum](signum, frame)
        except KeyboardInterrupt as error:
            raised.append(error)
            loop.call_soon_threadsafe(task.cancel)

    for signum in handlers:
        signal.signal(signum, handle)
    try:
        result = await coroutine
    except asyncio.CancelledError:
        if not raised:
            raise
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if raised:
        raise raised[0]
    return result


class StopSignals:
    """Tells the code of an event loop, in the main thread, that somebody asked this process to end."""

    def __init__(self, on_first: Callable[[], None], at_once: Callable[[], None] = lambda: None) -> None:
        """Take `at_once`, which is done before a second signal ends the process."""
        self._on_first = on_first
        self._at_once = at_once
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.received = False

    def handled(self) -> AbstractContextManager[None]:
        """Handle signals within the block: the first calls `on_first` and sets the event, a second ends the
        process."""
        return _handled(self._stop, self._at_once)

    def event(self) -> asyncio.Event:
        """Make an event of the running loop that a signal sets, or has set."""
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

    def _stop(self, signum: int) -> None:
        del signum
        self.received = True
        self._on_first()
        if self._waiting is not None:
            loop, event = self._waiting
            loop.call_soon_threadsafe(event.set)  # a handler alone does not wake a loop that sleeps


@contextmanager
def kept_sigterm() -> Iterator[None]:
    """Keep a SIGTERM handler while Ray connects and replaces it. A signal that Ray's handler took meanwhile
    (it raises SystemExit) goes to the kept one."""
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
