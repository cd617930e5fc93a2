"""Whoever is not reached, two libraries' errors are told in the same plain words."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
import pytest

from rayk.types.reaching import why_unreached


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A port where everybody is answered so, and then closed; None: where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if answer is not None:
            sock.listen()
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                peer, _ = sock.accept()
                with peer:
                    peer.recv(65536)
                    peer.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        yield sock.getsockname()[1]
        stop.set()
        if answer is not None:
            socket.create_connection(sock.getsockname()).close()
            thread.join()


def by_urllib(url: str) -> None:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=60).close()


def by_aiohttp(url: str) -> None:
    async def get() -> None:
        async with aiohttp.ClientSession() as session, session.get(url):
            pass

    asyncio.run(get())


@pytest.mark.parametrize("get", [by_urllib, by_aiohttp])
@pytest.mark.parametrize(
    ("scheme", "answer", "says"),
    [
        ("http", None, "nothing listens there"),
        ("https", b"HTTP/1.1 200 OK\r\n\r\n", "it does not speak TLS as asked"),
        ("http", b"", "disconnected"),
    ],
)
def test_plain_words(get: Callable[[str], None], scheme: str, answer: bytes | None, says: str) -> None:
    with (
        listener(answer) as port,
        pytest.raises((OSError, aiohttp.ClientError, http.client.HTTPException)) as caught,
    ):
        get(f"{scheme}://127.0.0.1:{port}/")
    told = why_unreached(caught.value)
    assert says in told.replace("it closed the connection", "disconnected")
    assert "ssl:default" not in told
    assert "Errno" not in told


def test_names_and_several_addresses() -> None:
    assert why_unreached(socket.gaierror(-2, "Name or service not known")) == "no host has this name"
    both = OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed")
    assert why_unreached(both) == "nothing listens there"
    assert why_unreached(TimeoutError("timed out")) == ""
