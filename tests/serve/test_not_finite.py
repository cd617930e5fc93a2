"""A server over a model whose weights are not finite never answers 200 with nonsense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import ThreadEngine
from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.limits import HttpSettings
from rayk.serve.text import Text
from rayk.types.config import EngineConfig
from tests.completer import EngineCompleter, card_of, serve
from tests.serve.test_guard import ask
from tests.weights import spoil


@pytest.fixture(scope="module")
def url(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    model = spoil(checkpoint("llama"), folder, {"model.norm.weight": 0}, value=float("nan"))
    with ThreadEngine(EngineConfig(model=str(model), num_blocks=64)) as engine:
        card = card_of(model, engine)
        text = Text(build_tokenizer(card.vocab_size, adds_bos=False))
        with serve(make_app(EngineCompleter(engine, card), HttpSettings(), text=text)) as found:
            yield found


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 3}, {"stream": True}, {"n": 2}, {"echo": True, "logprobs": 1}]
)
def test_every_way_to_ask_ends_in_a_typed_error(url: str, more: dict[str, Any]) -> None:
    body = {"model": "spoiled", "prompt": [5, 6, 7], "max_tokens": 3, **more}
    status, answer, _ = ask(url, "POST", "/v1/completions", body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (500, "not_finite", "server_error")
