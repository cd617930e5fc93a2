"""VllmEngine owns the process of one vLLM engine, which runs in an interpreter of its own (rayk.vllm.driver).

It is a plain class, which `placement` makes a Ray actor; its async methods run there. However the actor ends,
even by Ray itself, all processes of the engine end with it: rayk.vllm.keeper sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayk.models.hub import model_folder
from rayk.types.config import VllmEngineConfig
from rayk.types.errors import DeadlineExceeded, EngineDied, InternalError, Unsupported, shortened
from rayk.types.waiting import busy
from rayk.vllm.arguments import engine_arguments, engine_environment
from rayk.vllm.messages import PREFIX, BadFrame, Frame, decode_header, decode_prefix
from rayk.vllm.refusals import MAX_WORDS, cause_in, complaint_in, refusal

END_S = 20.0
"""How long all processes of an engine may take to be gone once they were killed."""
LAST_WORDS_S = 2.0
"""How long what an engine wrote before it died, or failed a request, may take to be read."""
WORDS_POLL_S = 0.05
KEPT_CHARACTERS = 1 << 16
"""How much is kept of the end of its log, which tells what an engine died of."""
PORTS = range(20000, 32000)
"""Ports below those that the kernel gives away itself."""


class VllmEngine:
    """Owns an engine, which starts once. An engine that failed is thrown away with its actor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._to_driver: asyncio.StreamWriter | None = None
        """Connects to the driver; closed, it ends the engine."""
        self._pid: int | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._log, self._num_logged = "", 0
        self._readers: list[asyncio.Task[Any]] = []
        self._death: EngineDied | None = None
        self._dead = asyncio.Event()
        """Set once no process of it is left."""
        self._left = asyncio.Event()
        self._rests = False

    def __repr__(self) -> str:
        return f"VllmEngine({self.name})"

    async def describe(self) -> dict[str, Any]:
        """Tell facts of process and devices, as actors.worker does."""
        host, device = socket.gethostname(), platform.processor() or "cpu"
        return {"name": self.name, "pid": os.getpid(), "host": host, "device": device}

    async def clock_ns(self) -> int:
        """Return this host's monotonic clock, which tokens are stamped with."""
        return time.monotonic_ns()

    async def start(self, name: str, config: VllmEngineConfig, host: str, secret: str) -> dict[str, Any]:
        """Start the engine; returns the settings that it runs with. `name`: in its first cell. `host`: where
        others reach it.

        Raises Unsupported with vLLM's words where it refuses the model or an argument, EngineDied where it
        cannot start, DeadlineExceeded, CheckpointError of a model that cannot be fetched. After any of them
        nothing of it is left.
        """
        self.name = name
        folder = await asyncio.to_thread(model_folder, config.model)
        environment = _base_environment() | engine_environment(config, host, _free_port(host))
        await self._launch(config.python, environment)
        try:
            # Only this user may read it. All of its processes have when it has started.
            with tempfile.NamedTemporaryFile("w", prefix="rayk-secret-") as secret_file:
                secret_file.write(secret)
                secret_file.flush()
                arguments = engine_arguments(replace(config, model=str(folder)), secret_file.name, host)
                started = await self._ask(config.start_s, "start", arguments=arguments)
        except _DriverError as failure:
            await self.end()
            error = refusal(self.name, self._log, failure.version, failure.words)
            raise error or EngineDied(self.name, failure.words) from None
        except EngineDied as death:
            await self._dead.wait()
            raise (refusal(self.name, self._log) or death) from None
        except DeadlineExceeded:
            await self.end()
            raise
        facts: dict[str, Any] = started.header["facts"]
        return facts

    async def ask(self, timeout_s: float, op: str, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """Run an operation of the driver; returns its answer, with `why` for a request that vLLM failed.

        Raises EngineDied, DeadlineExceeded, and Unsupported with vLLM's words where it refuses a request.
        """
        num_logged = self._num_logged
        try:
            frame = await self._ask(timeout_s, op, **arguments)
        except _DriverError as failure:
            if failure.words.startswith("EngineDeadError"):
                self._say_dead(await self._words(cause_in, num_logged) or failure.words)
                await self.end()
                assert self._death is not None
                raise self._death from None
            if op != "generate":
                raise InternalError(f"{self.name}, {op}", failure.words, self._log[-MAX_WORDS:]) from None
            if failure.words.startswith("EngineGenerateError"):
                raise EngineDied(self.name, f"it fails a request: {failure.words}") from None
            raise Unsupported(f"vLLM {failure.version} refuses: {failure.words}") from None
        if frame.header.get("finish_reason") == "error":
            frame.header["why"] = await self._words(complaint_in, num_logged)
        return frame.header, frame.body

    async def run(self) -> None:
        """Wait until the cell is done with the engine, or it ends. Raises what it died of."""
        self._left = asyncio.Event()
        waits = [asyncio.create_task(event.wait()) for event in (self._dead, self._left)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self._death is not None:
            raise self._death

    async def leave(self) -> None:
        """Let the cell go; the engine lives on."""
        self._left.set()

    async def rest(self) -> None:
        """Stop all processes of the engine until it is asked something. An idle rank takes a core, because
        NIXL's progress thread spins."""
        if self._death is None:
            self._signal(signal.SIGSTOP)
            self._rests = True

    async def join(self, name: str) -> None:
        """Let another cell use the engine under this name."""
        self.name = name

    async def end(self) -> None:
        """End all processes of the engine. Raises DeadlineExceeded where some are still there after END_S."""
        if self._to_driver is None:
            return
        self._say_dead("it was ended")
        self._to_driver.close()
        try:
            async with asyncio.timeout(END_S):
                await self._dead.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the end of all processes of {self.name}", END_S, busy()) from None

    async def _launch(self, python: str, environment: dict[str, str]) -> None:
        reading, writing = os.pipe()
        keeper = [sys.executable, "-m", "rayk.vllm.keeper", str(writing)]
        try:
            process = await asyncio.create_subprocess_exec(
                *keeper,
                *(python, "-m", "rayk.vllm.driver"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(writing,),
                env=environment,
                limit=1 << 20,
            )
        finally:
            os.close(writing)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._to_driver = process.stdin
        self._readers = [
            asyncio.create_task(self._read_answers(process.stdout, process.stdin)),
            asyncio.create_task(self._read_log(process.stderr)),
            asyncio.create_task(self._read_status(reading)),
        ]

    async def _ask(self, timeout_s: float, op: str, **arguments: Any) -> Frame:
        if self._death is not None:
            raise self._death
        assert self._to_driver is not None, "started before"
        if self._rests:
            self._signal(signal.SIGCONT)
            self._rests = False
        number = next(self._numbers)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):  # whoever waits gets its death for an answer
                    self._to_driver.write(Frame({"op": op, "id": number, **arguments}).encode())
                    await self._to_driver.drain()
                frame = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{op} on {self.name}", timeout_s, busy()) from None
        finally:
            del self._waiting[number]
        if "error" in frame.header:
            raise _DriverError(str(frame.header.get("version", "")), str(frame.header["error"]))
        return frame

    async def _words(self, find: Callable[[str], str], num_logged: int) -> str:
        """Find words in what vLLM logged after so many characters; its log may lag behind its answers."""
        until, before = time.monotonic() + LAST_WORDS_S, ""
        while True:
            new = min(self._num_logged - num_logged, len(self._log))
            words = find(self._log[len(self._log) - new :])
            # What is logged comes line by line: all is there when no more comes.
            if (words and words == before) or time.monotonic() > until:
                return words
            before = words
            await asyncio.sleep(WORDS_POLL_S)

    async def _read_answers(self, stream: asyncio.StreamReader, to_driver: asyncio.StreamWriter) -> None:
        try:
            while True:
                num_header_bytes, num_body_bytes = decode_prefix(await stream.readexactly(PREFIX.size))
                header = decode_header(await stream.readexactly(num_header_bytes))
                frame = Frame(header, await stream.readexactly(num_body_bytes))
                waiting = self._waiting.get(header.get("id", 0))
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)
        except asyncio.IncompleteReadError:
            pass  # its keeper tells what it died of
        except BadFrame as error:
            self._say_dead(f"its driver does not speak as rayk's does: {error}")
            to_driver.close()
            while await stream.read(1 << 16):
                pass

    async def _read_log(self, stream: asyncio.StreamReader) -> None:
        """Copy the engine's log into this actor's own log, and keep its end."""
        while chunk := await stream.read(1 << 16):
            sys.stderr.write(text := chunk.decode(errors="replace"))
            sys.stderr.flush()
            self._log = (self._log + text)[-KEPT_CHARACTERS:]
            self._num_logged += len(text)

    async def _read_status(self, pipe: int) -> None:
        """Read what the keeper reports; its end is that of all the engine's processes."""
        reader, status = asyncio.StreamReader(), None
        connect = asyncio.get_running_loop().connect_read_pipe
        transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb"))
        try:
            while line := await reader.readline():
                word, _, number = line.decode().partition(" ")
                if word == "began":
                    self._pid = int(number)
                else:
                    status = int(number)
        finally:
            transport.close()
        if status is None:
            self._signal(signal.SIGKILL)
        await asyncio.wait(self._readers[:2], timeout=LAST_WORDS_S)
        self._say_dead(_ending(status, self._log))
        self._dead.set()

    def _signal(self, number: signal.Signals) -> None:
        """Send it to all processes that the driver began, which stay in its group."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)

    def _say_dead(self, cause: str) -> None:
        """Declare the engine dead, so that nothing waits for it any more."""
        if self._death is None:
            self._death = EngineDied(self.name, cause)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._death)


class _DriverError(Exception):
    """The driver answered with an error."""

    def __init__(self, version: str, words: str) -> None:
        super().__init__(version, words)
        self.version, self.words = version, words


def _ending(status: int | None, log: str) -> str:
    """Explain for people how an engine ended. `status`: as subprocess has it; None: its keeper was killed,
    too."""
    if status is None:
        how = "its processes were killed"
    elif status < 0:
        how = f"its process was killed by {signal.Signals(-status).name}"
    else:
        how = f"its process ended with status {status}"
    words = cause_in(log) or next((line for line in reversed(log.splitlines()) if line.strip()), "")
    return f"{how}: {shortened(words.strip(), MAX_WORDS)}" if words else how


def _base_environment() -> dict[str, str]:
    """Return this process's environment without what concerns its interpreter. It has the folder of rayk's
    sources, except where rayk is installed: that folder has other packages, too, so vLLM's environment must
    have a rayk of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RAY_", "VIRTUAL_ENV"))}
    sources = Path(__file__).parents[2]
    return kept if sources.name == "site-packages" else kept | {"PYTHONPATH": str(sources)}


def _free_port(host: str) -> int:
    """Find a free port. Raises OSError where none of many is free."""
    for _ in range(100):
        port = random.choice(PORTS)  # noqa: S311 - no secret
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((host, port))
            return port
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop} is free at {host}")
