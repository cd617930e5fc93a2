"""Calls as aiperf 0.13.0 and guidellm 0.8.1 make them, recorded while test_load_generators.py ran."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.conftest import Server

WORDS = "erate sorrow in dead Edwards grave"
PART = [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]
USAGE = {"include_usage": True}
CALLS: dict[str, dict[str, Any]] = {
    "aiperf chat": {
        "messages": [{"role": "user", "content": WORDS}],
        "max_completion_tokens": 12,
        "stream_options": USAGE,
    },
    "aiperf completions": {"prompt": WORDS, "max_tokens": 12, "stream_options": USAGE},
    "guidellm chat": {
        "messages": PART,
        "max_completion_tokens": 12,
        "stream_options": {**USAGE, "continuous_usage_stats": True},
    },
    "guidellm completions": {
        "prompt": WORDS,
        "max_tokens": 12,
        "stop": None,
        "stream_options": {**USAGE, "continuous_usage_stats": True},
    },
}


def call(server: Server, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body)."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
    headers = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "User-Agent": "aiperf/1.0",
        "X-Request-ID": "31c1",
        "X-Correlation-ID": "81a7",
    }
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, dict(answer.headers), data


@pytest.mark.parametrize("name", CALLS)
def test_a_streamed_call_tells_text_and_usage(server: Server, name: str) -> None:
    body = {"model": server.model_id, "stream": True, "ignore_eos": True, "temperature": 0, **CALLS[name]}
    is_chat = "chat" in name
    status, headers, data = call(server, "POST", f"/v1/{'chat/' if is_chat else ''}completions", body)
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream")
    lines = [line for line in data.decode().split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    template = server.tokenizer.apply_chat_template
    messages = [{"role": "user", "content": WORDS}]
    prompt = list(template(messages, add_generation_prompt=True)["input_ids"]) if is_chat else WORDS
    num_prompt = len(prompt if is_chat else server.ids(prompt))
    expected = server.truth(prompt, 12, ignore_eos=True)
    texts = [c["delta"].get("content", "") if is_chat else c["text"] for c in _choices(chunks)]
    assert "".join(texts) == server.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (num_prompt, 12)
    told = [c["usage"] for c in chunks]
    if "continuous_usage_stats" not in body["stream_options"]:
        assert told == [None] * len(chunks)
        return
    so_far = [usage["completion_tokens"] for usage in told]
    assert so_far == sorted(so_far)
    assert so_far[-1] == 12
    assert all(usage["total_tokens"] == num_prompt + n for usage, n in zip(told, so_far, strict=True))


def _choices(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/models"])
def test_head_is_answered_as_get_without_the_body(server: Server, path: str) -> None:
    status, headers, data = call(server, "GET", path)
    assert data
    found, told, nothing = call(server, "HEAD", path)
    assert (found, nothing) == (status, b"")
    assert found == 200
    assert told["content-type"] == headers["content-type"]


def test_head_is_counted_where_get_is(server: Server) -> None:
    def count() -> float:
        text = call(server, "GET", "/metrics")[2].decode()
        name = 'rayk_front_requests_total{path="/v1/models",status="200"} '
        return next((float(x.removeprefix(name)) for x in text.splitlines() if x.startswith(name)), 0.0)

    before = count()
    call(server, "HEAD", "/v1/models")
    assert count() == before + 1


def test_head_does_not_ask_for_an_answer(server: Server) -> None:
    num_asked = len(server.completer.asked)
    assert call(server, "HEAD", "/v1/completions")[0] == 405
    assert len(server.completer.asked) == num_asked
