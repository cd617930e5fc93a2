"""An OpenAI-style server whose answers take known times: what a load generator is held against.

It runs on an event loop of its own thread, and writes down when it did what (time.monotonic_ns).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

START_S = 30.0


@dataclass
class Script:
    """How one request is answered."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_chunk: int = 1
    first_chunk: int = 1
    num_tokens: int | None = None
    """None: as many as were asked for."""
    status: int = 200
    tells_token_ids: bool = True
    tells_usage: bool = True
    breaks_after: int | None = None
    """Chunks after which the connection breaks."""
    error_after: int | None = None
    """Chunks after which an error comes in the stream."""
    hangs: bool = False
    waits_for: int = 0
    """Requests that must have been open at once before this one is answered."""
    num_prompt_tokens: int | None = None


@dataclass
class Seen:
    """One request as the server saw it."""

    body: dict[str, Any]
    headers: dict[str, str]
    received_ns: int
    chunk_ns: list[int] = field(default_factory=list)
    ended_ns: int = 0


class FakeServer:
    """Answers by `script`, which is asked with the number of the request and its body."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Script], num_slots: int | None = None) -> None:
        self._script = script
        self._num_slots = num_slots
        self.seen: list[Seen] = []
        self.url = ""
        self.num_open = 0
        self.max_open = 0
        self.models: list[dict[str, Any]] = [{"id": "fake", "object": "model", "vocab_size": 1000}]
        self._slots: asyncio.Semaphore | None = None

    async def list_models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": self.models})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        received_ns = time.monotonic_ns()
        seen = Seen(await request.json(), dict(request.headers), received_ns)
        script = self._script(len(self.seen), seen.body)
        self.seen.append(seen)
        if script.status != 200:
            error = {"error": {"message": f"scripted {script.status}", "type": "scripted"}}
            return web.json_response(error, status=script.status, headers={"Retry-After": "1"})
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            if self._slots is None:
                return await self._stream(request, seen, script)
            async with self._slots:
                return await self._stream(request, seen, script)
        finally:
            seen.ended_ns = time.monotonic_ns()
            self.num_open -= 1

    async def _stream(self, request: web.Request, seen: Seen, script: Script) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = request.path.endswith("chat/completions")
        if is_chat:
            await self._event(
                response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            )
        while self.max_open < script.waits_for:
            await asyncio.sleep(0.01)
        if script.hangs:
            await asyncio.sleep(START_S * 10)
        left = seen.body["max_tokens"] if script.num_tokens is None else script.num_tokens
        total, number = left, 0
        while left:
            await asyncio.sleep(script.gap_s if number else script.ttft_s)
            if number == script.breaks_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == script.error_after:
                await self._event(response, {"error": {"message": "scripted failure"}})
                return response
            count = min(left, script.tokens_per_chunk if number else script.first_chunk)
            left -= count
            choice: dict[str, Any] = {"index": 0, "finish_reason": None if left else "length"}
            text = "x" * count
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            if script.tells_token_ids:
                choice["token_ids"] = list(range(count))
            seen.chunk_ns.append(time.monotonic_ns())
            await self._event(response, {"choices": [choice]})
            number += 1
        if script.tells_usage:
            prompt = seen.body.get("prompt", [])
            usage = {
                "prompt_tokens": len(prompt)
                if script.num_prompt_tokens is None
                else script.num_prompt_tokens,
                "completion_tokens": total,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _event(self, response: web.StreamResponse, data: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def serve(self, ready: threading.Event, stopped: threading.Event) -> None:
        """The thread's work, until `stopped`."""
        asyncio.run(self._serve(ready, stopped))

    async def _serve(self, ready: threading.Event, stopped: threading.Event) -> None:
        if self._num_slots is not None:
            self._slots = asyncio.Semaphore(self._num_slots)
        app = web.Application()
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        ready.set()
        while not stopped.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()


@contextmanager
def serving(
    script: Callable[[int, dict[str, Any]], Script] | Script, num_slots: int | None = None
) -> Iterator[FakeServer]:
    """A server that answers by the script; with `num_slots`, so many requests at a time, others wait."""
    always = script if callable(script) else lambda _number, _body: script
    server = FakeServer(always, num_slots)
    ready, stopped = threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve, args=(ready, stopped), daemon=True)
    thread.start()
    assert ready.wait(START_S), "the server did not start"
    try:
        yield server
    finally:
        stopped.set()
        thread.join(START_S)
