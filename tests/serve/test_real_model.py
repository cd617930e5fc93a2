"""A real model behind `rayk serve`, from TP 1 to TP 3, through the `openai` client: its own chat template,
stop strings, and emoji whose bytes are several tokens. What is right, transformers says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.conftest import ROOT
from tests.markers import nixl, ray, real, slow
from tests.serve.test_serve_command import serving

pytestmark = [real, slow, ray, nixl, pytest.mark.timeout(600)]
MESSAGES = [{"role": "user", "content": "What is gravity? Answer in one sentence."}]
EMOJI = "Animals: 🐼 🐘 🦙 🐼 🐘 🦙 🐼 🐘 🦙 🐼 🐘"
PROMPTS = (ROOT / "jobs" / "real_prompts.jsonl").read_text(encoding="utf-8").splitlines()
SCRIPTS = next(p for p in (json.loads(line)["prompt"] for line in PROMPTS) if "हिन्दी" in p)
NUM_TOKENS = 32


@dataclass(frozen=True)
class RealServer:
    client: openai.OpenAI
    model_id: str
    tokenizer: Any
    reference: Any

    def truth(self, prompt: list[int], *, ignore_eos: bool = False) -> list[int]:
        """Greedy tokens by transformers; none is near a tie."""
        (answer,) = self.reference.generate([prompt], NUM_TOKENS, ignore_eos=ignore_eos)
        assert min(answer.margins) > 1e-4
        return list(answer.token_ids)

    def text(self, token_ids: list[int]) -> str:
        """By transformers."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.model_id, messages=MESSAGES, max_tokens=NUM_TOKENS, temperature=0, **fields
        )

    def complete(self, prompt: str, **fields: Any) -> Any:
        return self.client.completions.create(
            model=self.model_id, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, **fields
        )


@pytest.fixture(scope="module")
def server(real_model: Path, reference: Callable[..., Any]) -> Iterator[RealServer]:
    options = ("--prefill-tp", "1", "--decode-tp", "3", "--dtype", "float32", "--api-key", "k")
    with serving(real_model, *options, "--set", "engine.num_blocks=128") as running:
        tokenizer = AutoTokenizer.from_pretrained(real_model)
        yield RealServer(running.client(), running.model_id, tokenizer, reference(real_model))


@pytest.fixture(scope="module")
def chat_answer(server: RealServer) -> str:
    """What transformers answers to MESSAGES, by its own rendering of the model's template."""
    prompt = server.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    return server.text(server.truth(list(prompt)))


def test_a_chat_is_transformers_own(server: RealServer, chat_answer: str) -> None:
    assert len(chat_answer.split()) > 5
    assert server.chat().choices[0].message.content == chat_answer
    pieces = [c.choices[0].delta.content or "" for c in server.chat(stream=True) if c.choices]
    assert "".join(pieces) == chat_answer
    assert len(pieces) > 5, "it came in pieces"


def test_a_stop_string_ends_it_and_is_left_out(server: RealServer, chat_answer: str) -> None:
    stop = " ".join(chat_answer.split()[3:5])  # of several tokens
    (choice,) = server.chat(stop=[stop]).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == chat_answer.partition(stop)[0]
    *_, last = (c for c in server.chat(stop=[stop], stream=True) if c.choices)
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", [EMOJI, SCRIPTS], ids=["emoji", "scripts"])
def test_characters_split_over_tokens_stream_whole(server: RealServer, prompt: str) -> None:
    """No piece ends within a character, and together they are what transformers decodes."""
    tokens = server.truth(list(server.tokenizer(prompt)["input_ids"]), ignore_eos=True)
    right = server.text(tokens)
    assert any("\ufffd" in server.text([token]) for token in tokens), "no character is split"
    assert any(ord(character) > 0xFFFF for character in right), "no emoji came whole"
    options = {"extra_body": {"ignore_eos": True}}
    whole = server.complete(prompt, **options).choices[0].text
    pieces = [c.choices[0].text for c in server.complete(prompt, stream=True, **options) if c.choices]
    # A character whose last tokens never came may end both.
    assert whole.rstrip("\ufffd") == right.rstrip("\ufffd")
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces[:-1])
