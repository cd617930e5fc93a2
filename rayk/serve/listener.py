"""uvicorn as rayk's own front runs it: heads are bounded in size and time, unread answers in time."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayk.serve.errors import ApiError, to_json
from rayk.serve.limits import HttpSettings
from rayk.serve.unread import UnreadWatch

CLOSE_S = 5.0
"""Connections may take this long to close once nothing runs on them."""
KEEP_ALIVE_S = 75
"""Idle connections stay longer than clients keep them, so that no client sends into one that is being
closed."""
LINGER_S = 2.0
"""A refused client may go on sending for this long: a connection that is closed earlier takes the answer with
it."""


def listener_config(app: Any, settings: HttpSettings, **more: Any) -> uvicorn.Config:
    """Configure uvicorn for an app whose bodies guard.Guard bounds. `more`: uvicorn's own settings."""

    class Bounded(BoundedHttp):
        max_head_bytes, head_s, unread_s = settings.max_head_bytes, settings.head_s, settings.unread_s

    return uvicorn.Config(
        app,
        http=Bounded,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(CLOSE_S),
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        **more,
    )


class BoundedHttp(HttpToolsProtocol):
    """Bounds one connection. uvicorn itself waits for ever for a head, takes one of any length, and waits for
    ever for a client that reads nothing, with 64 KiB in hand."""

    max_head_bytes: int
    head_s: float
    unread_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        """Runs while a head is wanted."""
        self._in_head = False
        """Whether a head has begun and is not whole."""
        self._num_parsed = 0
        """Bytes of the last head, or of its trailers, in whole lines."""
        self._num_fed = 0
        """Bytes that came since a head ended, or since something else than a head."""
        self._refusal: ApiError | None = None

    # asyncio's calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch = UnreadWatch(transport, self.unread_s)
        self._want_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_timer()
        self._watch.end()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch.begin(self.loop)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._num_fed += len(data)
        super().data_received(data)
        if self._num_fed > self.max_head_bytes:
            self._refuse(self._too_large())
        if self._refusal is None and self._timer is None and (self._in_head or not self._is_answering):
            self._want_head()

    # The parser's.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_parsed = True, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._num_parsed += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_parsed += len(name) + len(value) + len(": \r\n")

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head is too large."""
        self._in_head, self._num_fed = False, 0
        if self._num_parsed > self.max_head_bytes:
            self._refuse(self._too_large())
        if self._refusal is None:
            self._unset_timer()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_fed = 0
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_fed = 0
        if self._refusal is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch.begin(self.loop)

    # Refusals.

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="invalid_http"))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _want_head(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self._on_time)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        if self._is_answering:
            self._want_head()  # the answer goes first
        elif self._in_head:
            problem = f"the head of the request was not here within {self.head_s:g} s"
            self._refuse(ApiError(408, problem, "timeout_error"))
        else:
            self.transport.close()  # it never said a word

    def _too_large(self) -> ApiError:
        problem = f"the head of the request is larger than {self.max_head_bytes} bytes"
        return ApiError(431, problem, code="head_too_large")

    def _refuse(self, error: ApiError) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._unset_timer()
        if self._is_answering:
            self.transport.close()  # an answer inside another one is none
            return
        body = to_json(error.body)
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)
