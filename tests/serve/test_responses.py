"""Answers and chunks have the fields of the types that describe them, and no others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
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
from rayk.types.request import FinishReason
from rayk.types.serving import Delta, ServerRequest
from tests.serve.test_guard import PLAIN, ask, client_of, running, scripted

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


def test_usage_tells_of_drafts_where_there_were_any() -> None:
    """By the names that OpenAI gives predicted outputs: its client reads them."""

    async def drafted(_: ServerRequest) -> AsyncIterator[Delta]:
        yield Delta(token_ids=(70,))
        yield Delta(
            token_ids=(71,),
            finish_reason=FinishReason.LENGTH,
            num_cached_tokens=0,
            num_drafted=5,
            num_accepted=3,
        )

    with running(scripted(drafted)) as url:
        done = client_of(url).completions.create(**PLAIN | {"n": 2})
        assert done.usage is not None
        details = done.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 4)
        assert_is(ask(url, "POST", "/v1/completions", PLAIN)[1], CompletionAnswer)
        _, events, _ = ask(
            url,
            "POST",
            "/v1/completions",
            {**PLAIN, "stream": True, "stream_options": {"include_usage": True}},
        )
        told = [json.loads(event.removeprefix(b"data: ")) for event in events.strip().split(b"\n\n")[:-1]]
        (usage,) = (part["usage"] for part in told if part.get("usage"))
        assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 3
    with running(scripted()) as url:
        assert "completion_tokens_details" not in ask(url, "POST", "/v1/completions", PLAIN)[1]["usage"]
