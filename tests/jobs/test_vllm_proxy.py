"""The plain proxy before two vLLM servers, which are played: what each is asked, and what comes back."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from jobs.vllm_proxy import make_handler, served
from tests.pd import HANG_S

PARAMS = {"do_remote_prefill": True, "rayk_proof": {"version": 2}}
PROMPT = {"model": "m", "prompt": "a", "max_tokens": 3}


class Played:
    """Answers as vLLM's server does: whole, or as server-sent events, the second once `goes_on` is set."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.goes_on = threading.Event()
        self.url = ""

    def handler(played) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has a self of its own
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                played.asked.append(body)
                if body["prompt"] == "refused" and body["max_tokens"] > 1:
                    self.send_error(400, "too long")
                elif body.get("stream"):
                    self._stream()
                else:
                    self._say("application/json", json.dumps({"kv_transfer_params": PARAMS, "said": "b"}))

            def _stream(self) -> None:
                self._say("text/event-stream; charset=utf-8", "data: one\n\n")
                assert played.goes_on.wait(HANG_S)
                self.wfile.write(b"data: [DONE]\n\n")

            def _say(self, kind: str, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def proxied() -> Iterator[tuple[str, Played, Played]]:
    """(the proxy's address, P, D)."""
    p, d = Played(), Played()
    with served(p.handler(), HANG_S) as prefill, served(d.handler(), HANG_S) as decode:
        p.url, d.url = prefill, decode
        with served(make_handler(prefill, decode), HANG_S) as url:
            yield url, p, d


def ask(url: str, **more: Any) -> Any:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(PROMPT | more).encode())
    return urllib.request.urlopen(request, timeout=HANG_S)


def test_an_answer_that_is_streamed_is_passed_on_as_it_comes() -> None:
    with proxied() as (url, p, d):
        options = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 3, "n": 2}
        with ask(url, **options) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert [answer.readline() for _ in range(2)] == [b"data: one\n", b"\n"], "before D has ended"
            d.goes_on.set()
            assert answer.read() == b"data: [DONE]\n\n"
        one_token = {"max_tokens": 1, "min_tokens": 0, "n": 1, "stream": False}
        assert p.asked == [PROMPT | one_token | {"kv_transfer_params": {"do_remote_decode": True}}]
        assert d.asked == [PROMPT | options | {"kv_transfer_params": PARAMS}]


def test_a_whole_answer_is_d_s() -> None:
    with proxied() as (url, _, d):
        with ask(url) as answer:
            assert answer.headers["Content-Type"] == "application/json"
            assert json.load(answer)["said"] == "b"
        assert d.asked == [PROMPT | {"kv_transfer_params": PARAMS}]


def test_what_d_refuses_or_nobody_answers_is_told() -> None:
    with proxied() as (url, _, d):
        for stream in (False, True):
            with pytest.raises(urllib.error.HTTPError, match="400") as refused:
                ask(url, prompt="refused", stream=stream)
            assert "too long" in json.load(refused.value)["error"]
        gone = d.url
    with served(make_handler(gone, gone), HANG_S) as url, pytest.raises(urllib.error.HTTPError, match="502"):
        ask(url)
