"""Heads of requests over raw sockets: how large they may be, and how long they may take."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from rayk.serve.app import make_app
from rayk.serve.command import plan_http
from rayk.serve.limits import HttpSettings
from rayk.types.errors import UserError
from rayk.types.serving import Delta, ModelCard, ServerRequest
from tests.completer import Script, ScriptedCompleter, serve, tokens_then_end
from tests.markers import thorough
from tests.pd import wait_until

CARD = ModelCard(model_id="tiny", folder="nowhere", vocab_size=300, max_positions=64)
BODY = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
PATIENCE_S = 3.0
"""A request that is sent at once is here before, on a slow machine, too."""
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def connected(
    script: Script | None = None, **settings: Any
) -> Iterator[tuple[ScriptedCompleter, socket.socket]]:
    limits = HttpSettings(**settings)
    completer = ScriptedCompleter(CARD, script or tokens_then_end([70, 71]))
    with serve(make_app(completer, limits), limits) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port), timeout=60) as peer:
            yield completer, peer


def rest_of(peer: socket.socket) -> bytes:
    """Whatever comes until the server closes."""
    return b"".join(iter(lambda: peer.recv(65536), b""))


def assert_refused(told: bytes, status: int, words: str) -> None:
    """One answer, in OpenAI's form."""
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), told[:200]
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]


@pytest.mark.parametrize(("more", "is_refused"), [(-40, False), (40, True)])
@pytest.mark.parametrize("part", ["path", "one header", "many headers"])
def test_a_head_has_a_largest_size(part: str, more: int, is_refused: bool) -> None:
    """Told whole in one piece, together with the next request."""
    limit = 4000
    frame = b"GET /v1/models%s HTTP/1.1\r\nHost: x\r\n%s\r\n"
    num_left = limit + more - len(frame)
    fills = {
        "path": (b"?q=" + b"x" * num_left, b""),
        "one header": (b"", b"X: " + b"x" * num_left + b"\r\n"),
        "many headers": (b"", b"Many: x\r\n" * (num_left // 9)),
    }
    last = MODELS.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with connected(max_head_bytes=limit) as (_, peer):
        peer.sendall(frame % fills[part] + last)
        told = rest_of(peer)
    if is_refused:
        assert_refused(told, 431, "4000 bytes")
    else:
        assert told.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nLong: ",
        b"GET / HTTP/1.1\r\nLong",
        b"\r\n" * 40,
        HEAD + CHUNKED + b"2;",
        HEAD + CHUNKED + b"0\r\nTrail: ",
    ],
)
def test_what_never_becomes_a_head_is_not_kept(start: bytes) -> None:
    fill = (b"\r\n" if start.startswith(b"\r") else b"xx") * 600
    with connected(max_head_bytes=10_000, body_s=600.0) as (completer, peer):
        try:
            for data in (start, *(fill for _ in range(100))):
                peer.sendall(data)
            told = rest_of(peer)
        except OSError:
            told = b""  # closed while there was more to send
        if told:
            assert_refused(told, 431, "10000 bytes")
        else:
            assert b"chunked" in start, "an answer was to come"
    assert completer.asked == []


def test_long_bodies_and_many_requests_are_no_long_heads() -> None:
    body = BODY[:-1] + b" " * 50_000 + b"}"
    chunks = b"".join(b"3e8\r\n%s\r\n" % body[i : i + 1000].ljust(1000) for i in range(0, len(body), 1000))
    with connected(max_head_bytes=2000) as (completer, peer):
        for sent in (body.rjust(2_000_000), *[body] * 29):  # the first is more than is read at once
            peer.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
        peer.sendall(HEAD + b"Connection: close\r\n" + CHUNKED + chunks + b"0\r\n\r\n")
        told = rest_of(peer)
    assert told.count(b"HTTP/1.1 200 OK") == 31
    assert len(completer.asked) == 31


@thorough
@pytest.mark.parametrize(
    ("before", "start"), [(b"", b"G"), (b"", b"GET / HTTP/1.1\r\nHost: x\r\n"), (MODELS, b"GET / HTTP")]
)
def test_a_head_that_does_not_come_is_not_waited_for(before: bytes, start: bytes) -> None:
    with connected(head_s=PATIENCE_S) as (_, peer):
        if before:
            peer.sendall(before)
            assert b"200 OK" in peer.recv(65536)
        peer.sendall(start)
        assert_refused(rest_of(peer), 408, f"{PATIENCE_S:g} s")


def test_who_never_says_a_word_is_told_nothing() -> None:
    with connected(head_s=0.1) as (_, peer):
        assert rest_of(peer) == b""


@thorough
def test_an_answer_may_take_longer_than_a_head() -> None:
    """Also where the head of the next request has begun."""

    async def slow(server_request: ServerRequest) -> AsyncIterator[Delta]:
        yield Delta(token_ids=(70,))
        await asyncio.sleep(1.2 * PATIENCE_S)
        async for delta in tokens_then_end([71])(server_request):
            yield delta

    body = BODY[:-1] + b', "stream": true, "return_token_ids": true}'
    with connected(slow, head_s=PATIENCE_S) as (_, peer):
        peer.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + MODELS[:9])
        told = rest_of(peer)
    answer, _, refusal = told.partition(b"data: [DONE]")
    assert b'"token_ids":[70]' in answer
    assert b'"token_ids":[71]' in answer
    assert b"HTTP/1.1 408 " in refusal


def test_who_closes_its_half_is_gone() -> None:
    async def endless(_request: ServerRequest) -> AsyncIterator[Delta]:
        await asyncio.sleep(3600)
        yield Delta()

    with connected(endless) as (completer, peer):
        peer.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        wait_until(lambda: completer.asked, what=lambda: "a request")
        peer.shutdown(socket.SHUT_WR)
        assert rest_of(peer) == b""
        wait_until(lambda: completer.closed, what=lambda: "its end")


def test_what_is_no_http_is_refused_in_openais_form() -> None:
    with connected() as (_, peer):
        peer.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert_refused(rest_of(peer), 400, "Invalid HTTP")


def test_ray_serves_proxy_is_not_told_of_heads() -> None:
    with pytest.raises(UserError, match="--limit head_s=3"):
        plan_http(kind="serve", port=0, limits=["head_s=3"], is_local=True)
    front = plan_http(kind="uvicorn", port=0, limits=["head_s=3"], is_local=True)
    assert front.port
    assert front.settings == HttpSettings(head_s=3.0)
