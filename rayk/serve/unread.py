"""Clients who read nothing of their answers are cut; slow ones are not."""

from __future__ import annotations

import asyncio
import logging

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNREAD_S = 120.0
"""Kernels take up to 64 KiB at once for a slow client, and nothing in between."""
_LOG = logging.getLogger(__name__)


class UnreadWatch:
    """Cuts a connection whose client takes nothing of what waits for it for `unread_s`."""

    def __init__(self, transport: asyncio.Transport, unread_s: float) -> None:
        self._transport = transport
        self._unread_s = unread_s
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch from now on: bytes wait, or are about to."""
        self.end()
        self._look_later(loop)

    def end(self) -> None:
        """Stop watching: nothing waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        num_waiting = self._transport.get_write_buffer_size()
        self._timer = loop.call_later(self._unread_s, self._look, loop, num_waiting)

    def _look(self, loop: asyncio.AbstractEventLoop, num_before: int) -> None:
        self._timer = None
        num_waiting = self._transport.get_write_buffer_size()
        if num_waiting and num_waiting == num_before:
            _LOG.warning("a client read nothing for %g s: its connection is cut", self._unread_s)
            self._transport.abort()
        elif num_waiting:
            self._look_later(loop)


class CutUnread:
    """Has an UnreadWatch look at each connection that is sent to (ASGI, outside of all else on uvicorn)."""

    def __init__(self, app: ASGIApp, unread_s: float = UNREAD_S) -> None:
        self._app = app
        self._unread_s = unread_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn's `send` is a method of what has the connection.
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        if transport is None:
            await self._app(scope, receive, send)
            return
        watch = UnreadWatch(transport, self._unread_s)

        async def watched(message: Message) -> None:
            watch.begin(asyncio.get_running_loop())
            await send(message)
            if not transport.get_write_buffer_size():
                watch.end()

        await self._app(scope, receive, watched)


def middlewares() -> list[Middleware]:
    """Ray Serve's proxy calls it, by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(CutUnread)]
