"""`cache_salt`, as in vLLM's API: requests share cached KV with those of an equal salt alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rayk.engine.build import ThreadEngine
from rayk.serve.app import make_app
from rayk.types.config import EngineConfig
from tests.completer import EngineCompleter, card_of, serve
from tests.serve.conftest import Server

PROMPT = list(range(4, 54))
HIT = 48
"""Whole blocks of the prompt before its last token."""


@pytest.fixture(scope="module")
def client(checkpoint: Callable[..., Path]) -> Iterator[openai.OpenAI]:
    model = checkpoint("qwen3")
    with ThreadEngine(EngineConfig(model=str(model), prefix_caching=True)) as engine:
        completer = EngineCompleter(engine, card_of(model, engine))
        with serve(make_app(completer)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            yield client
        completer.check_all_free()


def num_cached(client: openai.OpenAI, prompt: Any, salt: str | None) -> int:
    extra = {} if salt is None else {"cache_salt": salt}
    done = client.completions.create(
        model=client.models.list().data[0].id, prompt=prompt, max_tokens=2, temperature=0, extra_body=extra
    )
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    return done.usage.prompt_tokens_details.cached_tokens or 0


def test_equal_salts_hit_and_unlike_ones_never_do(client: openai.OpenAI) -> None:
    salts = ("a", "b", "ab", None, "A", "\0", "a ")
    assert [num_cached(client, PROMPT, salt) for salt in salts] == [0] * len(salts)
    assert [num_cached(client, PROMPT, salt) for salt in salts] == [HIT] * len(salts)
    # A prompt that begins so shares what its own salt has, and another one's prompt shares nothing.
    assert num_cached(client, PROMPT[:33] + [7] * 17, "a") == 32
    assert num_cached(client, PROMPT[:33] + [7] * 17, "c") == 0


def test_conversations_have_salts_too(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        done = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Once upon a time there was a small village " * 3}],
            max_tokens=2,
            extra_body={"cache_salt": salt},
        )
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        return done.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("a") == cached("b") == 0
    assert cached("a") == cached("b") > 0


@pytest.mark.parametrize("salt", ["", 5, ["a"], "a" * 1025])
def test_a_salt_is_a_text_that_is_not_empty(server: Server, salt: Any) -> None:
    for ask in (server.complete, server.chat):
        what = PROMPT if ask == server.complete else [{"role": "user", "content": "a"}]
        fields = {"cache_salt": salt} if ask == server.complete else {"extra_body": {"cache_salt": salt}}
        with pytest.raises(openai.BadRequestError) as caught:
            ask(what, max_tokens=1, **fields)
        assert caught.value.param == "cache_salt"
