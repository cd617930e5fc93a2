"""Calls and streams between processes: what they bring, who may call, and what is left of a lost end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rayk.lines import line as lines_module
from rayk.lines.line import SECRET_BYTES, Funnel, Last, Line, LineAddress, LineLost, LineService, LineThread
from rayk.types.errors import EngineDied, InternalError

HOST = "127.0.0.1"
LIMIT_S = 60.0


class Service:
    """Counts, fails, waits."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.entered = asyncio.Event()

    async def twice(self, number: int) -> int:
        return 2 * number

    async def dies(self, what: str) -> None:
        raise EngineDied("prefill0", what, rank=1)

    async def breaks(self) -> None:
        raise ZeroDivisionError("by nothing")

    async def misses(self) -> None:
        raise FileNotFoundError("no file")

    async def gives(self, what: str) -> Any:
        """What no pickle can hold: an item, or an error of rayk."""
        if what == "item":
            return threading.Lock()
        error = EngineDied("prefill0", "a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    async def gives_each(self) -> AsyncIterator[Any]:
        yield 1
        yield threading.Lock()

    async def waits_for(self, what: str) -> None:
        """For something that is given up itself."""
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.cancel)
        await future

    async def count(self, name: str, num: int, *, pause_s: float = 0.0) -> AsyncIterator[tuple[str, int]]:
        try:
            for i in range(num):
                await asyncio.sleep(pause_s)
                yield name, i
        finally:
            self.closed.append(name)

    async def sizes(self, sizes: list[int]) -> AsyncIterator[bytes]:
        for size in sizes:
            yield random.Random(size).randbytes(size)

    async def waits(self, name: str) -> AsyncIterator[str]:
        try:
            yield name
            self.entered.set()
            await asyncio.sleep(LIMIT_S)
        finally:
            self.closed.append(name)

    async def ends_with(self, num: int) -> AsyncIterator[Any]:
        try:
            for i in range(num):
                yield i
            yield Last(num)
            yield "more"
        finally:
            self.closed.append("ends_with")

    def lines(self) -> LineService:
        return LineService(
            calls={
                "twice": self.twice,
                "dies": self.dies,
                "breaks": self.breaks,
                "misses": self.misses,
                "gives": self.gives,
                "waits_for": self.waits_for,
            },
            streams={
                "count": self.count,
                "sizes": self.sizes,
                "waits": self.waits,
                "gives_each": self.gives_each,
                "ends_with": self.ends_with,
            },
        )


def run(test: Any) -> None:
    """`test(service, lines, address)` on a loop, with the service closed behind it."""

    async def whole() -> None:
        service = Service()
        lines = service.lines()
        address = await lines.open(HOST)
        try:
            async with asyncio.timeout(LIMIT_S):
                await test(service, lines, address)
        finally:
            await lines.close()

    asyncio.run(whole())


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_many_calls_and_streams_share_a_line():
    async def test(_service: Service, _lines: LineService, address: LineAddress) -> None:
        line = Line(address)

        async def counted(name: str, num: int) -> list[tuple[str, int]]:
            return [item async for item in line.stream("count", name, num, pause_s=0.001)]

        names = [f"s{i}" for i in range(40)]
        found = await asyncio.gather(*(counted(n, i) for i, n in enumerate(names)))
        assert found == [[(n, k) for k in range(i)] for i, n in enumerate(names)]
        assert await asyncio.gather(*(line.call("twice", i) for i in range(100))) == list(range(0, 200, 2))
        await line.close()

    run(test)


def test_a_stream_may_end_with_an_item():
    async def test(service: Service, _lines: LineService, address: LineAddress) -> None:
        line = Line(address)
        for num in range(3):
            assert [item async for item in line.stream("ends_with", num)] == list(range(num + 1))
            await until(lambda n=num: service.closed == ["ends_with"] * (n + 1))
        await line.close()

    run(test)


def test_frames_of_any_size_arrive_whole_and_in_order():
    sizes = [0, 1, 65_535, 65_536, 1 << 20, (5 << 20) + 1, 7]

    async def test(_service: Service, _lines: LineService, address: LineAddress) -> None:
        line = Line(address)
        found = [item async for item in line.stream("sizes", sizes)]
        assert found == [random.Random(size).randbytes(size) for size in sizes]
        await line.close()

    run(test)


def test_errors_of_rayk_cross_intact_and_others_by_name():
    async def test(_service: Service, _lines: LineService, address: LineAddress) -> None:
        line = Line(address)
        with pytest.raises(EngineDied) as caught:
            await line.call("dies", "a cosmic ray")
        assert caught.value == EngineDied("prefill0", "a cosmic ray", rank=1)
        with pytest.raises(InternalError, match="the call breaks: ZeroDivisionError: by nothing") as broken:
            await line.call("breaks")
        assert "in breaks" in broken.value.trace
        with pytest.raises(InternalError, match="no file"):
            await line.call("misses")
        with pytest.raises(InternalError, match="KeyError: 'nothing_of_the_kind'"):
            await line.call("nothing_of_the_kind")
        assert await line.call("twice", 4) == 8
        await line.close()

    run(test)


def test_whatever_cannot_be_told_ends_the_call_all_the_same():
    async def test(_service: Service, _lines: LineService, address: LineAddress) -> None:
        line = Line(address)
        for what in ("item", "error"):
            with pytest.raises(InternalError, match="TypeError: cannot pickle|EngineDied: .*a lock"):
                await asyncio.wait_for(line.call("gives", what), LIMIT_S / 4)
        stream = line.stream("gives_each")
        assert await anext(stream) == 1
        with pytest.raises(InternalError, match="TypeError: cannot pickle"):
            await asyncio.wait_for(anext(stream), LIMIT_S / 4)
        with pytest.raises(LineLost, match="CancelledError"):
            await asyncio.wait_for(line.call("waits_for", "that"), LIMIT_S / 4)
        assert await line.call("twice", 4) == 8
        await line.close()

    run(test)


def test_a_stream_that_is_left_early_is_closed_at_the_service():
    async def test(service: Service, _lines: LineService, address: LineAddress) -> None:
        line = Line(address)
        stream = line.stream("waits", "left")
        assert await anext(stream) == "left"
        await stream.aclose()
        await until(lambda: service.closed == ["left"])
        assert await line.call("twice", 1) == 2
        await line.close()

    run(test)


def test_who_loses_the_caller_gives_up_what_it_asked_for():
    async def test(service: Service, _lines: LineService, address: LineAddress) -> None:
        line = Line(address)
        streams = [line.stream("waits", name) for name in "ab"]
        assert [await anext(s) for s in streams] == ["a", "b"]
        await line.close()
        await until(lambda: sorted(service.closed) == ["a", "b"])
        for stream in streams:
            with pytest.raises(LineLost):
                await anext(stream)

    run(test)


def test_a_service_that_closes_ends_every_call_and_takes_no_new_one():
    async def test(service: Service, lines: LineService, address: LineAddress) -> None:
        line = Line(address)
        stream = line.stream("waits", "here")
        await anext(stream)
        await lines.close()
        with pytest.raises(LineLost):
            await anext(stream)
        assert service.closed == ["here"]
        with pytest.raises(LineLost):
            await line.call("twice", 1)

    run(test)


def test_a_service_that_closes_is_quiet_about_those_it_served(caplog: pytest.LogCaptureFixture):
    async def test(_service: Service, lines: LineService, address: LineAddress) -> None:
        callers = [Line(address) for _ in range(3)]
        assert [await line.call("twice", i) for i, line in enumerate(callers)] == [0, 2, 4]
        await lines.close()
        for line in callers:
            await line.close()

    with caplog.at_level("ERROR", logger="asyncio"):
        run(test)
    assert [r.getMessage() for r in caplog.records] == []


def test_a_thread_that_hangs_keeps_nobody_who_closes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines_module, "CLOSE_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    async def hangs() -> None:
        entered.set()
        leave.wait(LIMIT_S)

    thread = LineThread(LineService(calls={"hangs": hangs}))

    async def test() -> None:
        line = Line(thread.open(HOST))
        call = asyncio.create_task(line.call("hangs"))
        assert await asyncio.to_thread(entered.wait, LIMIT_S)
        await asyncio.to_thread(thread.close)
        assert not call.done()
        leave.set()
        await asyncio.wait({call}, timeout=LIMIT_S)
        assert call.done(), "answered or lost, whichever came first"
        await line.close()

    asyncio.run(test())


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def proof(secret: bytes, whose: bytes, *nonces: bytes) -> bytes:
    """As the module's docstring says, by hand."""
    return hmac.new(secret, whose + b"".join(nonces), hashlib.sha256).digest()


@pytest.mark.parametrize("shown", ["nothing", "the service's", "the secret", "another nonce's"])
def test_nothing_is_unpickled_for_who_does_not_know_the_secret(shown: str, tmp_path: Path):
    bomb = pickle.dumps(Bomb(tmp_path / "gone_off"))
    frame = len(bomb).to_bytes(4, "big") + bomb

    async def test(_service: Service, _lines: LineService, address: LineAddress) -> None:
        async def met() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes, bytes]:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(mine)
            return reader, writer, await reader.readexactly(32), await reader.readexactly(32)

        mine = os.urandom(32)
        reader, writer, theirs, service_proof = await met()
        assert service_proof == proof(address.secret, b"service", mine, theirs)
        wrong = {
            "nothing": bytes(32),
            "the service's": service_proof,
            "the secret": address.secret,
            "another nonce's": proof(address.secret, b"caller", mine, os.urandom(32)),
        }
        writer.write(wrong[shown] + frame)
        with contextlib.suppress(ConnectionError):  # it hung up while there was more to read
            assert await reader.read() == b""
        writer.close()
        # The same bytes behind the proof do go off.
        assert not (tmp_path / "gone_off").exists()
        reader, writer, theirs, _ = await met()
        writer.write(proof(address.secret, b"caller", mine, theirs) + frame)
        await until((tmp_path / "gone_off").exists)
        writer.close()

    run(test)


@pytest.mark.parametrize("says", ["http", "zeros", "echo"])
def test_who_listens_where_a_service_was_learns_no_secret_and_has_nothing_unpickled(
    says: str, tmp_path: Path
):
    secret, heard, left = os.urandom(SECRET_BYTES), bytearray(), asyncio.Event()
    bomb = pickle.dumps(Bomb(tmp_path / "gone_off"))
    frame = len(bomb).to_bytes(4, "big") + bomb

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.readexactly(32))
        hello = {
            "http": b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3,
            "zeros": bytes(64),
            "echo": 2 * bytes(heard),
        }
        writer.write(hello[says][:64] + frame)
        with contextlib.suppress(ConnectionError):
            heard.extend(await reader.read())
        writer.close()
        left.set()

    async def test() -> None:
        server = await asyncio.start_server(meet, HOST, 0)
        line = Line(LineAddress(HOST, server.sockets[0].getsockname()[1], secret))
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(LineLost, match="somebody else"):
                await line.call("twice", 1)
            await left.wait()
        await line.close()
        server.close()

    asyncio.run(test())
    assert not (tmp_path / "gone_off").exists()
    assert len(heard) == 32, "he hears a caller's nonce, and no more"
    assert secret not in heard


def test_the_secret_is_not_shown():
    assert "abcdef" not in repr(LineAddress("h", 1, b"abcdef"))


async def drained(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


SCRIPT = """
import asyncio, pickle, sys, time
from rayk.lines.line import LineService, LineThread

async def forever():
    while True:
        yield time.monotonic()
        await asyncio.sleep(0.01)

thread = LineThread(LineService(streams={"forever": forever}))
sys.stdout.buffer.write(pickle.dumps(thread.open("127.0.0.1")))
sys.stdout.close()
time.sleep(600)
"""


def test_a_killed_process_is_noticed_at_once():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            address: LineAddress = pickle.load(process.stdout)

            async def test() -> None:
                line = Line(address)
                stream = line.stream("forever")
                for _ in range(3):
                    await anext(stream)
                os.kill(process.pid, signal.SIGKILL)
                async with asyncio.timeout(LIMIT_S):
                    with pytest.raises(LineLost):
                        await drained(stream)

            asyncio.run(test())
        finally:
            process.kill()


def test_a_thread_serves_without_a_loop_of_the_caller():
    async def twice(number: int) -> int:
        return 2 * number

    thread = LineThread(LineService(calls={"twice": twice}))
    address = thread.open(HOST)

    async def test() -> None:
        line = Line(address)
        assert await line.call("twice", 21) == 42
        thread.close()
        with pytest.raises(LineLost):
            await line.call("twice", 1)

    asyncio.run(test())


def test_a_funnel_brings_everything_once_and_in_order():
    num_items, num_threads = 20_000, 3

    async def test() -> list[tuple[int, int]]:
        funnel, found = Funnel(), []

        def put(thread: int) -> None:
            for i in range(num_items):
                funnel.put((thread, i))

        threads = [threading.Thread(target=put, args=(n,)) for n in range(num_threads)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(LIMIT_S):
            while len(found) < num_items * num_threads:
                await funnel.wait()
                found += funnel.take()
        return found

    found = asyncio.run(test())
    for thread in range(num_threads):
        assert [i for n, i in found if n == thread] == list(range(num_items))


def test_a_funnel_that_is_filled_while_it_goes_to_sleep_wakes():
    """An item that comes between the look and the sleep: put by the flag that says who sleeps."""

    async def test() -> None:
        class Late(Funnel):
            def __setattr__(self, name: str, value: Any) -> None:
                if name == "_is_waiting" and value:
                    super().__setattr__(name, False)
                    self.put("late")
                super().__setattr__(name, value)

        funnel = Late()
        async with asyncio.timeout(LIMIT_S):
            await funnel.wait()
        assert funnel.take() == ["late"]

    asyncio.run(test())


def test_nobody_listening_is_a_lost_line():
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]

    async def test() -> None:
        with pytest.raises(LineLost):
            await Line(LineAddress(HOST, port, bytes(SECRET_BYTES))).call("twice", 1)

    asyncio.run(test())
