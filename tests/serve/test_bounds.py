"""Every field of a request is bounded: what is beyond is a bad request that names the field."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.text import Text
from rayk.types.serving import ModelCard
from tests.completer import ScriptedCompleter, serve, tokens_then_end
from tests.serve.test_guard import ask, assert_error

HUGE = 10**4000
CARD = ModelCard(model_id="tiny", folder="nowhere", vocab_size=300, max_positions=64)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    text = Text(build_tokenizer(300, adds_bos=True))
    with serve(make_app(ScriptedCompleter(CARD, tokens_then_end([70])), text=text)) as found:
        yield found


def nested(levels: int) -> Any:
    value: Any = 1
    for i in range(levels):
        value = [value] if i % 2 else {"x": value}
    return value


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", HUGE),
        ("n", 129),
        ("best_of", HUGE),
        ("max_tokens", HUGE),
        ("max_tokens", 64),
        ("logprobs", 21),
        ("logprobs", HUGE),
        ("top_k", HUGE),
        ("seed", HUGE),
        ("priority", HUGE),
        ("deadline_s", 1e300),
        ("temperature", HUGE),
        ("repetition_penalty", 1e9),
        ("stop", ["a"] * 17),
        ("stop", "a" * 257),
        ("stop_token_ids", [1] * 17),
        ("stop_token_ids", [HUGE]),
        ("logit_bias", {"5": 1}),
        ("logit_bias", nested(500)),
        ("prompt_cache_key", "a" * 10_000),
        ("prompt", ["a"] * 257),
        ("prompt", [HUGE]),
        ("prompt", [300]),
        ("prompt", nested(500)),
        ("metadata", nested(65)),
        ("x" * 100_000, 1),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_field_beyond_its_bounds(url: str, param: str, value: Any) -> None:
    found = ask(url, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, param: value})
    message = assert_error(found, 400, param[:100])
    assert len(message) < 300


@pytest.mark.parametrize("levels", [65, 500])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "messages"])
def test_deep_chats(url: str, field: str, levels: int, caplog: pytest.LogCaptureFixture) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a", "more": 1}]}
    if field == "messages":
        chat["messages"][0]["more"] = nested(levels)
    else:
        chat["chat_template_kwargs"] = {"more": nested(levels)}
    with caplog.at_level(logging.WARNING):
        found = ask(url, "POST", "/v1/chat/completions", chat)
    assert "64 levels" in assert_error(found, 400, field)
    assert not caplog.records
    chat["chat_template_kwargs"], chat["messages"][0]["more"] = {"more": nested(50)}, nested(50)
    assert ask(url, "POST", "/v1/chat/completions", chat)[0] == 200


@pytest.mark.parametrize(
    "body", [b'{"prompt":' + b"[" * 1_000_000, b'{"a":' * 1_000_000, b"9" * 10_000], ids=len
)
def test_what_no_parser_takes(url: str, body: bytes) -> None:
    assert_error(ask(url, "POST", "/v1/completions", body), 400)
