"""Answers and chunks have the fields of the types that describe them, and no others."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from rayk.serve.responses import (
    ChatAnswer,
    ChatChunkChoice,
    CompletionAnswer,
    CompletionChoice,
    ErrorBody,
    HealthAnswer,
    ModelsAnswer,
)
from tests.serve.test_guard import PLAIN, ask, running, scripted

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def assert_is(value: Any, kind: Any) -> None:
    """Validation drops fields that the type does not have."""
    assert TypeAdapter(kind).validate_python(value, strict=True) == value


def test_answers_and_chunks_are_of_their_types() -> None:
    with running(scripted()) as url:
        for path, plain, answer, chunk, more in (
            ("/v1/completions", PLAIN, CompletionAnswer, CompletionChoice, {"logprobs": 1, "echo": True}),
            ("/v1/chat/completions", CHAT, ChatAnswer, ChatChunkChoice, {"logprobs": True}),
        ):
            for fields in ({}, more, {"return_token_ids": True}):
                body = {**plain, **fields}
                status, whole, _ = ask(url, "POST", path, body)
                assert status == 200, whole
                assert_is(whole, answer)
                _, events, _ = ask(url, "POST", path, {**body, "stream": True})
                *told, done = (event.removeprefix(b"data: ") for event in events.strip().split(b"\n\n"))
                assert done == b"[DONE]"
                choices = [choice for part in told for choice in json.loads(part)["choices"]]
                assert len(choices) > 1
                for choice in choices:
                    assert_is(choice, chunk)
        assert_is(ask(url, "POST", "/v1/completions", {})[1], ErrorBody)
        assert_is(ask(url, "GET", "/v1/models")[1], ModelsAnswer)
        assert_is(ask(url, "GET", "/health")[1], HealthAnswer)
