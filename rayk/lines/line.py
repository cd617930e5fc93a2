"""Lines: calls and streams from one process of a server to another, with next to nothing in between.

A Ray call takes about a millisecond of processor time on either side, a stream's first item two, and a
request of a server needs several of both. A line is one TCP connection that carries all calls of one process
to another at once. Ray still starts and ends processes, and says where they are: whoever serves lines gives
out a `LineAddress` through it.

    caller      32 bytes drawn at random
    service     32 bytes drawn at random; HMAC-SHA256 of "service", the caller's bytes and these
    caller      HMAC-SHA256 of "caller" and the same; then frames (number, method, args, kwargs) that begin
                calls, and (number, None, (), {}) that gives one up
    service     frames (number, item, error, is_last); the last one of a stream may be without an item, and
                an error that is none of rayk says that what was waited for was given up there
    frame       length (4 bytes, big endian), then a pickle

The key is the service's secret, which is drawn anew for each and never sent. Pickles come from processes of
the same server alone: either end unpickles nothing before the other has proved that it knows the secret; a
service that died may have left its port to somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import pickle
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rayk.lines.protocol import LineProtocol, framed
from rayk.types.bugs import bug
from rayk.types.errors import RaykError

Stream = Callable[..., AsyncIterator[Any]]
Call = Callable[..., Awaitable[Any]]

HELLO_S = 10.0
"""How long a connection may take to be made, and either end to prove that it knows the secret."""
SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
CLOSE_S = 5.0


class LineLost(ConnectionError):
    """The other end is not there, or not any more."""


@dataclass(frozen=True, slots=True)
class LineAddress:
    """Where a service is, for those who may call it."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Last:
    """What a stream yields where it knows that nothing follows: its end then takes no frame of its own."""

    item: Any


class LineService:
    """Answers calls on the loop that opened it."""

    def __init__(self, *, calls: Mapping[str, Call] = {}, streams: Mapping[str, Stream] = {}) -> None:
        """What may be called, by name. A stream that is given up, or whose caller is lost, is closed; it may
        yield its last item as `Last`."""
        self._calls = dict(calls)
        self._streams = dict(streams)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> LineAddress:
        """Listen at any port of this address."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: LineProtocol(self._arrived), host, 0)
        return LineAddress(host, self._server.sockets[0].getsockname()[1], self._secret)

    async def close(self) -> None:
        """Take no more calls, and give up those under way."""
        if self._server is not None:
            self._server.close()
        for caller in self._callers:
            caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)

    def _arrived(self, wire: LineProtocol) -> None:
        caller = asyncio.create_task(self._meet(wire))
        self._callers.add(caller)
        caller.add_done_callback(self._callers.discard)

    async def _meet(self, wire: LineProtocol) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        try:
            async with asyncio.timeout(HELLO_S):
                is_known = await _meet_caller(wire, self._secret)
            if is_known:
                wire.start(partial(self._begin, wire, running))
                await wire.lost.wait()
        except (OSError, TimeoutError):
            pass  # the caller is gone, or never was one
        finally:
            for call in running.values():
                call.cancel()
            wire.close()

    def _begin(self, wire: LineProtocol, running: dict[int, asyncio.Task[None]], frame: Any) -> None:
        number, method, args, kwargs = frame
        if method is None:
            if number in running:
                running[number].cancel()
            return
        call = asyncio.create_task(self._answer(wire, number, method, args, kwargs))
        running[number] = call
        call.add_done_callback(partial(_forget, running, number))

    async def _answer(self, wire: LineProtocol, number: int, method: str, args: Any, kwargs: Any) -> None:
        last: bytes | None = None
        try:
            if method in self._streams:
                await self._stream(wire, number, self._streams[method](*args, **kwargs))
            else:
                last = _frame((number, await self._calls[method](*args, **kwargs), None, True))
        except asyncio.CancelledError as failure:
            if _is_cancelled():
                raise  # by the caller, or with its connection
            last = _frame((number, None, type(failure).__name__, True))
        except Exception as failure:  # noqa: BLE001 - whatever it is, the caller waits for it
            if isinstance(failure, OSError) and wire.is_over:
                return  # the caller is gone
            last = _last_frame(number, method, failure)
        if last is not None:
            with contextlib.suppress(OSError):
                await wire.send(last)

    async def _stream(self, wire: LineProtocol, number: int, items: AsyncIterator[Any]) -> None:
        async with aclosing(items):  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Last):
                    await wire.send(_frame((number, item.item, None, True)))
                    return
                await wire.send(_frame((number, item, None, False)))
        await wire.send(_frame((number, None, None, True)))


class Funnel:
    """Items from another thread, for one coroutine that takes all there are.

    Whoever puts an item wakes the loop only where it waits: to wake it for each would have two threads pass
    Python's lock to and fro.
    """

    def __init__(self) -> None:
        """It belongs to the loop that takes."""
        self._loop = asyncio.get_running_loop()
        self._items: deque[Any] = deque()
        self._is_waiting = False
        self._wake = asyncio.Event()

    def put(self, item: Any) -> None:
        """It may be called from any thread, also after the loop has ended."""
        self._items.append(item)
        if self._is_waiting:
            self._is_waiting = False
            with contextlib.suppress(RuntimeError):  # it is closed: nobody takes any more
                self._loop.call_soon_threadsafe(self._wake.set)

    async def wait(self) -> None:
        """Return when there are items."""
        while not self._items:
            self._wake.clear()
            self._is_waiting = True
            if not self._items:  # an item that came before the line above woke nobody
                await self._wake.wait()
            self._is_waiting = False

    def take(self) -> list[Any]:
        return [self._items.popleft() for _ in range(len(self._items))]


class LineThread:
    """A service on a loop and a thread of its own, for processes that have no loop."""

    def __init__(self, service: LineService) -> None:
        self._service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lines")
        self._thread.start()

    def open(self, host: str) -> LineAddress:
        return asyncio.run_coroutine_threadsafe(self._service.open(host), self._loop).result(HELLO_S)

    def close(self) -> None:
        """Give up all calls, and end the thread, where these take no longer than CLOSE_S."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._service.close(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._service.close())  # where that was not awaited
        self._loop.run_until_complete(asyncio.sleep(0))  # its connections end one turn later
        self._loop.close()


class Line:
    """A caller's end. One event loop. Connects when it is first needed, and again when it was lost."""

    def __init__(self, address: LineAddress) -> None:
        self._address = address
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Queue[tuple[Any, Any, bool] | None]] = {}
        self._wire: LineProtocol | None = None
        self._connecting = asyncio.Lock()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """One answer. Raises what the service raised, InternalError for errors not of rayk, and LineLost."""
        wire, number, answers = await self._ask(method, args, kwargs)
        try:
            return (await self._next(number, answers))[0]
        finally:
            self._give_up(wire, number)

    async def stream(self, method: str, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Items as they come. Raises as `call` does. Closing it early gives the call up."""
        wire, number, answers = await self._ask(method, args, kwargs)
        try:
            is_last = False
            while not is_last:
                item, is_last = await self._next(number, answers)
                if item is not None or not is_last:
                    yield item
        finally:
            self._give_up(wire, number)

    async def close(self) -> None:
        """Let go of the connection; what is under way is lost."""
        if self._wire is not None:
            self._lose(self._wire)
            await asyncio.sleep(0)  # the socket is closed one turn later

    async def _ask(
        self, method: str, args: Any, kwargs: Any
    ) -> tuple[LineProtocol, int, asyncio.Queue[tuple[Any, Any, bool] | None]]:
        wire = self._wire or await self._connected()
        number = next(self._numbers)
        frame = _frame((number, method, args, kwargs))
        answers = self._answers[number] = asyncio.Queue()
        try:
            await wire.send(frame)
        except OSError as error:
            self._answers.pop(number, None)
            raise LineLost(f"{self._address}: {error}") from error
        except BaseException:
            self._give_up(wire, number)
            raise
        return wire, number, answers

    async def _next(
        self, number: int, answers: asyncio.Queue[tuple[Any, Any, bool] | None]
    ) -> tuple[Any, bool]:
        answer = await answers.get()
        if answer is None:
            raise LineLost(f"{self._address}: the connection ended")
        item, problem, is_last = answer
        if is_last:
            self._answers.pop(number, None)
        if isinstance(problem, RaykError):
            raise problem
        if problem is not None:
            raise LineLost(f"{self._address}: {problem}")
        return item, is_last

    def _give_up(self, wire: LineProtocol, number: int) -> None:
        """Where it is not over."""
        if self._answers.pop(number, None) is not None:
            wire.write(_frame((number, None, (), {})))

    async def _connected(self) -> LineProtocol:
        async with self._connecting:
            if self._wire is None:
                where = self._address
                try:
                    async with asyncio.timeout(HELLO_S):
                        wire = await _connect(where)
                except (OSError, TimeoutError) as error:
                    raise LineLost(f"{where}: {error}") from error
                self._wire = wire
                wire.start(self._answered, on_lost=partial(self._lose, wire))
            return self._wire or wire

    def _answered(self, frame: Any) -> None:
        number, item, error, is_last = frame
        if number in self._answers:
            self._answers[number].put_nowait((item, error, is_last))

    def _lose(self, wire: LineProtocol) -> None:
        """Tell those who wait, unless another connection has been made meanwhile."""
        wire.close()
        if self._wire is wire:
            self._wire = None
            for answers in self._answers.values():
                answers.put_nowait(None)
            self._answers.clear()


async def _connect(where: LineAddress) -> LineProtocol:
    """A connection to a service that knows the secret. Raises what the connection does, and LineLost."""
    loop = asyncio.get_running_loop()
    _, wire = await loop.create_connection(LineProtocol, where.host, where.port)
    try:
        await _meet_service(wire, where.secret)
    except BaseException:
        wire.close()
        raise
    return wire


async def _meet_service(wire: LineProtocol, secret: bytes) -> None:
    """Prove to a service that this end knows the secret, once it has. Raises LineLost where it does not."""
    ours = secrets.token_bytes(NONCE_BYTES)
    wire.write(ours)
    nonces = ours + await wire.read(NONCE_BYTES)
    shown = await wire.read(PROOF_BYTES)
    if not hmac.compare_digest(shown, _proof(secret, b"service", nonces)):
        raise LineLost("somebody else listens there")
    wire.write(_proof(secret, b"caller", nonces))


async def _meet_caller(wire: LineProtocol, secret: bytes) -> bool:
    """Whether a caller knows the secret; it is proved to him first that this end does."""
    nonces = await wire.read(NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
    wire.write(nonces[NONCE_BYTES:] + _proof(secret, b"service", nonces))
    shown = await wire.read(PROOF_BYTES)
    return hmac.compare_digest(shown, _proof(secret, b"caller", nonces))


def _proof(secret: bytes, whose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, whose + nonces, "sha256")


def _forget(running: dict[int, asyncio.Task[None]], number: int, _done: asyncio.Task[None]) -> None:
    running.pop(number, None)


def _frame(value: Any) -> bytes:
    return framed(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def _last_frame(number: int, method: str, failure: Exception) -> bytes:
    """How a call ends that failed: with the error itself where the caller knows it."""
    if isinstance(failure, RaykError):
        with contextlib.suppress(Exception):  # where it cannot be pickled, its text has to do
            return _frame((number, None, failure, True))
    return _frame((number, None, bug(f"the call {method}", failure), True))


def _is_cancelled() -> bool:
    """Whether a CancelledError is meant for this task, not for what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
