"""Answers on their way to clients, who may go before they have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayk.serve.errors import api_error, to_json
from rayk.types.errors import RaykError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
FATE = "rayk.fate"
"""Key of an ASGI scope: a dict for the `status` that an answer ended with, if not the one it began with."""
_LOG = logging.getLogger(__name__)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Await the work's result; None where the client left before, which cancels it. `receive`: after the
    body."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Also where this call itself is cancelled. What the work still has to give back, it does meanwhile.
        has_gone = not task.done()
        task.cancel()
        watch.cancel()
        await asyncio.wait({task, watch})
    if has_gone:
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("a request failed while it was aborted: %r", error)
        return None
    return task.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(value: Mapping[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


class EventStream(Response):
    """Sends server-sent events. The status waits for the first of them, so that an error before it has its
    own."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        """`events` are sent as they are, and closed when the client leaves."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send(send, scope.get(FATE, {})))

    async def _send(self, send: Send, fate: dict[str, int]) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_part(send, first)
            try:
                async for part in events:
                    await _send_part(send, part)
                await _send_part(send, DONE)
            except Exception as error:
                # Without [DONE]: it says that all was sent.
                response = api_error(error)
                fate["status"] = response.status
                await _send_part(send, event(response.body))
                if not isinstance(error, RaykError):
                    await send({"type": "http.response.body", "body": b""})
                    raise
            await send({"type": "http.response.body", "body": b""})


class HeadAsGet:
    """Answers HEAD as GET without the body, as HTTP asks of all servers: load generators look for /metrics
    with it (ASGI)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
