"""One TCP connection of a line: some bytes by number while its ends meet, pickled frames from then on.

A protocol on the transport itself: asyncio's streams would wake a task twice for each frame.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable
from typing import Any, cast

LENGTH_BYTES = 4
KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 8000}
"""A node that is gone sends nothing more: noticed within eight seconds (the last one counts milliseconds)."""
UNREAD_BYTES = 1 << 16
"""Read ahead from an end that has not proved anything yet."""


def framed(body: bytes) -> bytes:
    """Length and body, as `LineProtocol.start` takes them apart."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class LineProtocol(asyncio.Protocol):
    """One end of it, on the loop it was made on. Whoever has it closes it."""

    def __init__(self, on_made: Callable[[LineProtocol], None] | None = None) -> None:
        """`on_made`: called once it is connected."""
        self.lost = asyncio.Event()
        """The connection is over."""
        self._on_made = on_made
        self._on_frame: Callable[[Any], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._has_more = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()

    async def read(self, num_bytes: int) -> bytes:
        """The next so many, before `start`. Raises ConnectionResetError."""
        while len(self._unread) < num_bytes:
            self._raise_if_lost()
            self._has_more.clear()
            await self._has_more.wait()
        found = bytes(self._unread[:num_bytes])
        del self._unread[:num_bytes]
        return found

    def start(self, on_frame: Callable[[Any], None], on_lost: Callable[[], None] | None = None) -> None:
        """Trust the other end from now on: what it sends are frames, unpickled for `on_frame`."""
        self._on_frame, self._on_lost = on_frame, on_lost
        assert self._transport is not None, "connected"
        if self.lost.is_set():
            self._tell_lost()
            return
        self._transport.resume_reading()
        self._take_frames()

    def write(self, data: bytes) -> None:
        """Now or when it can be sent. A connection that is over swallows it."""
        assert self._transport is not None, "connected"
        if not self._transport.is_closing():
            self._transport.write(data)

    async def send(self, data: bytes) -> None:
        """Waits while too much is on its way, then writes. Raises ConnectionResetError."""
        self._raise_if_lost()
        self.write(data)
        if not self._may_write.is_set():
            await self._may_write.wait()
            self._raise_if_lost()

    def close(self) -> None:
        """End the connection once what was written is sent."""
        if self._transport is not None:
            self._transport.close()

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._on_frame is not None:
            self._take_frames()
            return
        self._has_more.set()
        if len(self._unread) > UNREAD_BYTES:
            assert self._transport is not None, "connected"
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Too much is on its way."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Let writers go on."""
        self._may_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        self._has_more.set()
        self._may_write.set()
        self._tell_lost()

    def _take_frames(self) -> None:
        assert self._on_frame is not None, "started"
        unread, start = self._unread, 0
        while len(unread) >= (body := start + LENGTH_BYTES):
            end = body + int.from_bytes(unread[start:body], "big")
            if len(unread) < end:
                break
            frame = pickle.loads(unread[body:end])  # noqa: S301 - the other end has proved that it is ours
            start = end
            self._on_frame(frame)
        del unread[:start]

    def _tell_lost(self) -> None:
        if self._on_lost is not None:
            self._on_lost()

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.lost.is_set() or self._transport is None or self._transport.is_closing()

    def _raise_if_lost(self) -> None:
        if self.is_over:
            raise ConnectionResetError("the connection is over")
