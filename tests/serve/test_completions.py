"""/v1/completions through the real `openai` client, against the reference and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from rayk.actors.tokenizer import load_decoder
from rayk.engine.build import ThreadEngine
from rayk.serve.app import make_app
from rayk.types.config import EngineConfig
from tests.completer import EngineCompleter, card_of, serve

TEXT = "Once upon a time there was a small village"


@dataclass(frozen=True)
class Server:
    """One for all tests of this file."""

    url: str
    model: Path
    completer: EngineCompleter
    client: openai.OpenAI
    tokenizer: Any

    @property
    def model_id(self) -> str:
        return self.model.name


@pytest.fixture(scope="module")
def server(checkpoint: Any) -> Iterator[Server]:
    model = checkpoint("qwen3")
    config = EngineConfig(model=str(model), num_blocks=256)
    with ThreadEngine(config, load_decoder=lambda: load_decoder(str(model))) as engine:
        completer = EngineCompleter(engine, card_of(model, engine))
        with serve(make_app(completer)) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
            yield Server(url, model, completer, client, AutoTokenizer.from_pretrained(model))
        completer.check_all_free()


@pytest.fixture(scope="module")
def truth(server: Server, reference: Callable[..., Any]) -> Callable[..., Any]:
    """`truth(text or ids, max_tokens)`: what transformers says."""
    known = reference(server.model)

    def ask(prompt: str | list[int], max_tokens: int) -> Any:
        ids = server.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        return known.generate([ids], max_tokens)[0]

    return ask


def test_a_whole_answer_is_the_references(server: Server, truth: Callable[..., Any]) -> None:
    done = server.client.completions.create(
        model=server.model_id,
        prompt=TEXT,
        max_tokens=20,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    expected = truth(TEXT, 20)
    choice = done.choices[0]
    assert choice.token_ids == list(expected.token_ids)
    assert choice.text == server.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == expected.finish_reason
    assert done.usage.prompt_tokens == len(server.tokenizer(TEXT)["input_ids"])
    assert done.usage.completion_tokens == len(expected.token_ids)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_says_the_same(server: Server, truth: Callable[..., Any]) -> None:
    stream = server.client.completions.create(
        model=server.model_id,
        prompt=TEXT,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    *chunks, last = list(stream)
    expected = truth(TEXT, 20)
    assert [t for c in chunks for t in c.choices[0].token_ids] == list(expected.token_ids)
    text = "".join(c.choices[0].text for c in chunks)
    assert text == server.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert [c.choices[0].finish_reason for c in chunks][-1] == expected.finish_reason
    assert not last.choices
    assert last.usage.completion_tokens == len(expected.token_ids)
