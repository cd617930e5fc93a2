"""/v1/chat/completions through the real `openai` client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.text import Text
from rayk.types.serving import ModelCard
from tests.completer import EngineCompleter, ScriptedCompleter, serve, tokens_then_end
from tests.serve.conftest import Server

MESSAGES = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "how many 🦙?", "name": "somebody"},
]


def prompt_of(server: Server, messages: Any = MESSAGES) -> list[int]:
    """The template's, by transformers."""
    return list(server.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def test_an_answer_is_the_references(server: Server) -> None:
    prompt = prompt_of(server)
    done = server.chat(MESSAGES, max_completion_tokens=12, extra_body={"return_token_ids": True})
    expected = server.truth(prompt, 12)
    (choice,) = done.choices
    assert choice.token_ids == list(expected.token_ids)
    assert choice.message.role == "assistant"
    assert choice.message.content == server.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == expected.finish_reason
    assert done.object == "chat.completion"
    assert done.usage.prompt_tokens == len(prompt)
    assert done.usage.completion_tokens == len(expected.token_ids)


def test_a_stream_names_the_role_once_and_says_the_same(server: Server) -> None:
    expected = server.truth(prompt_of(server), 12, ignore_eos=True)
    stream = server.chat(
        MESSAGES,
        max_tokens=12,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    *chunks, last = list(stream)
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert [c.delta.role for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [t for c in own for t in c.token_ids] == list(expected.token_ids)
        text = "".join(c.delta.content or "" for c in own)
        assert text == server.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]
    assert all(c.object == "chat.completion.chunk" for c in chunks)
    assert last.usage.completion_tokens == 24


def test_the_rest_of_the_context_unless_told_otherwise(server: Server) -> None:
    server.chat(MESSAGES, stop=["a", "e", "i", "o", "u", "t", " "])
    ask = server.completer.asked[-1]
    left = server.completer.model.max_positions - len(prompt_of(server))
    assert ask.request.sampling.max_tokens == left


def test_the_rest_of_the_pool_where_that_is_less(server: Server) -> None:
    completer = EngineCompleter(server.completer.engine, replace(server.completer.model, pool_tokens=60))
    with (
        serve(make_app(completer)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        client.chat.completions.create(model=server.model_id, messages=MESSAGES)  # type: ignore[arg-type]
    assert completer.asked[-1].request.sampling.max_tokens == 60 - len(prompt_of(server))


def test_pieces_of_text_are_one_message(server: Server) -> None:
    parts = [{"type": "text", "text": "how"}, {"type": "text", "text": "many"}]
    server.chat([{"role": "user", "content": parts}], max_tokens=1)
    expected = prompt_of(server, [{"role": "user", "content": "how\nmany"}])
    assert server.completer.asked[-1].request.prompt_token_ids == tuple(expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    messages = fields.pop("messages", MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        server.chat(messages, **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_special_tokens_are_the_templates_alone() -> None:
    """Also of a tokenizer that begins texts with one."""
    tokenizer = build_tokenizer(300, adds_bos=True)
    card = ModelCard(model_id="tiny", folder="nowhere", vocab_size=300, max_positions=4096)
    completer = ScriptedCompleter(card, tokens_then_end([70]))
    with (
        serve(make_app(completer, text=Text(tokenizer))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    (asked,) = completer.asked
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert list(asked.request.prompt_token_ids) == expected


def test_what_says_nothing_of_the_answer_is_taken(server: Server) -> None:
    done = server.chat(
        MESSAGES,
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
        tools=[],
        logit_bias={},
        extra_body={"min_tokens": 1, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert done.usage.completion_tokens == 1
