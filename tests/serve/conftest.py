"""One server over an engine in this process, for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from rayk.actors.tokenizer import load_decoder, load_vocabulary
from rayk.engine.build import ThreadEngine
from rayk.serve.app import make_app
from rayk.types.config import EngineConfig
from tests.completer import EngineCompleter, card_of, serve


@dataclass(frozen=True)
class Server:
    """What tests know of it."""

    url: str
    model: Path
    completer: EngineCompleter
    client: openai.OpenAI
    tokenizer: Any
    reference: Any

    @property
    def model_id(self) -> str:
        """As clients name it."""
        return self.model.name

    def ids(self, text: str) -> list[int]:
        """The tokenizer's default encoding."""
        return list(self.tokenizer(text)["input_ids"])

    def truth(self, prompt: str | Sequence[int], max_tokens: int, **options: Any) -> Any:
        """What transformers says, greedily."""
        ids = self.ids(prompt) if isinstance(prompt, str) else list(prompt)
        return self.reference.generate([ids], max_tokens, **options)[0]

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """A completion, greedy unless told otherwise; fields that are not OpenAI's among them."""
        known = {
            "max_tokens",
            "n",
            "stream",
            "stream_options",
            "temperature",
            "top_p",
            "seed",
            "stop",
            "echo",
        }
        known |= {"logprobs", "presence_penalty", "frequency_penalty", "model"}
        extra = {k: fields.pop(k) for k in list(fields) if k not in known}
        fields = {"model": self.model_id, "temperature": 0, **fields}
        return self.client.completions.create(prompt=prompt, extra_body=extra, **fields)

    def chat(self, messages: Any, **fields: Any) -> Any:
        """A chat completion, greedy unless told otherwise."""
        extra = fields.pop("extra_body", {})
        fields = {"model": self.model_id, "temperature": 0, **fields}
        return self.client.chat.completions.create(messages=messages, extra_body=extra, **fields)


@pytest.fixture(scope="session")
def server(checkpoint: Any, reference: Callable[..., Any]) -> Iterator[Server]:
    """The server; every block of its engine is free at the end."""
    model = checkpoint("qwen3")
    config = EngineConfig(model=str(model), num_blocks=256)
    loads = {
        "load_decoder": partial(load_decoder, str(model)),
        "load_vocabulary": partial(load_vocabulary, str(model)),
    }
    with ThreadEngine(config, **loads) as engine:
        completer = EngineCompleter(engine, card_of(model, engine))
        with serve(make_app(completer)) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
            tokenizer = AutoTokenizer.from_pretrained(model)
            yield Server(url, model, completer, client, tokenizer, reference(model))
            client.close()
        completer.check_all_free()
