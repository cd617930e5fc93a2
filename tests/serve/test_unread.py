"""Clients who read nothing are cut, and what they asked for ends; slow ones are not."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from rayk.serve.app import make_app
from rayk.serve.limits import HttpSettings
from rayk.serve.unread import UNREAD_S, CutUnread, UnreadWatch
from rayk.types.request import FinishReason
from rayk.types.serving import Delta, ServerRequest
from tests.completer import ScriptedCompleter, serve
from tests.markers import one_per
from tests.pd import wait_until
from tests.serve.test_listener import CARD, HEAD, rest_of

END = {True: b"[DONE]\n\n", False: b"}"}


async def endless(server_request: ServerRequest) -> AsyncIterator[Delta]:
    del server_request
    while True:
        yield Delta(token_ids=(70,) * 1000)
        await asyncio.sleep(0)


async def long(server_request: ServerRequest) -> AsyncIterator[Delta]:
    del server_request
    yield Delta(token_ids=(70,) * 10_000_000)
    yield Delta(finish_reason=FinishReason.STOP)


@one_per()
@pytest.mark.parametrize("front", ["uvicorn", "proxy"])
@pytest.mark.parametrize(("script", "stream"), [(endless, True), (long, False)])
def test_a_client_who_reads_nothing_is_cut(
    script: Any, stream: bool, front: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By rayk's own listener, and by what Ray Serve's proxy has around its app."""
    completer, limits = ScriptedCompleter(CARD, script), HttpSettings(unread_s=0.5)
    app: Any = make_app(completer, limits)
    if front == "proxy":
        app, limits = CutUnread(app, 0.5), HttpSettings()
    fields = {"prompt": [5], "stream": stream, "return_token_ids": True}
    body = json.dumps(fields).encode()
    with serve(app, limits) as url, socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        place = urlsplit(url)
        peer.connect((place.hostname, place.port))
        with caplog.at_level(logging.WARNING, "rayk"):
            peer.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: "read nothing" in caplog.text, what=lambda: "a word of it")
        wait_until(lambda: len(completer.closed) == 1, what=lambda: "the request's end")
        peer.settimeout(60)
        assert not rest_of(peer).endswith(END[stream])
    assert caplog.text.count("read nothing") == 1


class SlowReader:
    """A transport, of whose bytes a client takes `sizes` from look to look."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)
        self.was_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.sizes[0]

    def abort(self) -> None:
        self.was_aborted = True


class Clock:
    """A loop whose timers run when they are told to."""

    def __init__(self) -> None:
        self.timers: list[Any] = []

    def call_later(self, delay_s: float, call: Any, *args: Any) -> Any:
        assert delay_s == 120
        self.timers.append(lambda: call(*args))


@pytest.mark.parametrize(
    ("sizes", "is_cut"),
    [((70_000, 69_999, 1, 0), False), ((0, 80_000, 1, 0), False), ((70_000, 60_000, 60_000), True)],
)
def test_only_who_takes_nothing_is_cut(sizes: tuple[int, ...], is_cut: bool) -> None:
    clock, transport = Clock(), SlowReader(*sizes)
    UnreadWatch(transport, UNREAD_S).begin(clock)  # type: ignore[arg-type]
    while clock.timers:
        transport.sizes.pop(0)
        clock.timers.pop()()
    assert transport.was_aborted == is_cut
    assert len(transport.sizes) == 1
