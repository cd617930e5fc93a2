"""A client that goes takes its requests with it, everywhere."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.text import Text
from rayk.types.serving import Delta, ModelCard, ServerRequest
from tests.completer import ScriptedCompleter, serve
from tests.each import each
from tests.markers import thorough
from tests.pd import wait_until
from tests.serve.conftest import Server

CARD = ModelCard(model_id="tiny", folder="nowhere", vocab_size=300, max_positions=4096)


def start(url: str, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """A request whose answer is still to come."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return connection


@thorough
@each("n", [1, 3])
@each("stream", [True, False])
@each("has_begun", [True, False])
@each("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_choice_is_aborted_and_has_the_time_to_clean_up(
    n: int, stream: bool, has_begun: bool, path: str
) -> None:
    cleaned: list[str] = []

    async def endless(server_request: ServerRequest) -> AsyncIterator[Delta]:
        try:
            while has_begun:
                yield Delta(token_ids=(70,))
                await asyncio.sleep(0.01)
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)  # as somebody who tells engines
            cleaned.append(server_request.request.request_id)

    completer = ScriptedCompleter(CARD, endless)
    text = Text(build_tokenizer(CARD.vocab_size, adds_bos=False))
    body: dict[str, Any] = {"max_tokens": 1000, "n": n, "stream": stream}
    prompt_fields = (
        {"prompt": [5]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    with serve(make_app(completer, text=text)) as url:
        connection = start(url, path, {**body, **prompt_fields})
        if stream and has_begun:
            assert connection.getresponse().readline().startswith(b"data: ")
        wait_until(lambda: len(completer.asked) == n, what=lambda: f"asked {len(completer.asked)}")
        assert cleaned == []
        sock = connection.sock
        connection.close()
        if sock is not None:
            sock.close()
        wait_until(lambda: len(cleaned) == n, what=lambda: f"cleaned up {cleaned}")
    assert (
        sorted(cleaned) == sorted(completer.closed) == sorted(a.request.request_id for a in completer.asked)
    )


def test_engines_give_their_blocks_back(server: Server) -> None:
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "n": 2,
    }
    before = len(server.completer.closed)
    connection = start(server.url, "/v1/completions", body)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    wait_until(lambda: len(server.completer.closed) == before + 2)
    server.completer.check_all_free()
    assert server.complete([5, 6, 7], max_tokens=2).usage.completion_tokens == 2


def test_many_clients_have_their_own_answers(server: Server) -> None:
    """Streams of all lengths at once; every third client goes in the middle."""
    prompts = [[5 + i, 9, 200 - i] for i in range(12)]
    truth = [list(server.truth(p, 10 + i, ignore_eos=True).token_ids) for i, p in enumerate(prompts)]
    found: dict[int, list[int]] = {}

    def run(i: int) -> None:
        stream = server.complete(
            prompts[i], max_tokens=10 + i, ignore_eos=True, stream=True, return_token_ids=True
        )
        told: list[int] = []
        with stream:
            for chunk in stream:
                told += chunk.choices[0].token_ids
                if i % 3 == 2 and len(told) > 3:
                    break
        found[i] = told

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for i, expected in enumerate(truth):
        assert found[i] == (expected if i % 3 != 2 else expected[: len(found[i])]), i
    server.completer.check_all_free()
