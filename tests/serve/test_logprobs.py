"""Log probabilities and echo, in both of OpenAI's forms, against the reference's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayk.serve.text import Text
from tests.helpers import assert_matches
from tests.serve.conftest import Server

TEXT = "Grüße aus Köln, how many"


def reference_logprobs(server: Server, token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """log_softmax behind every token, [tokens, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(server.model, dtype=dtype)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0], dim=-1)


def check_told(server: Server, told: list[float], token_ids: list[int]) -> None:
    """Of the last tokens, as many as are told of."""
    exact = reference_logprobs(server, token_ids, torch.float64)
    eager = reference_logprobs(server, token_ids, torch.float32)
    found, last = eager.clone(), len(token_ids) - 1
    # Among all that eager says: the few numbers told say little of how far off an honest one may be.
    found[torch.arange(last - len(told), last), torch.tensor(token_ids[-len(told) :])] = torch.tensor(told)
    assert_matches(found, exact, eager)


def check_columns(server: Server, found: Any, token_ids: list[int], num_top: int) -> None:
    """Of tokens behind a first one that nothing is said of."""
    exact = reference_logprobs(server, token_ids, torch.float64)
    text = Text(server.tokenizer)
    assert found.tokens == [text.token(t).text for t in token_ids]
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    check_told(server, found.token_logprobs[1:], token_ids)
    for place, top in enumerate(found.top_logprobs[1:]):
        best = exact[place].topk(num_top).indices.tolist()
        names = [text.token(t).text for t in best]
        assert list(top)[:num_top] == list(dict.fromkeys(names))
        assert top[found.tokens[place + 1]] == pytest.approx(found.token_logprobs[place + 1], abs=0)


@pytest.mark.parametrize("form", ["text", "ids"])
@pytest.mark.parametrize("stream", [True, False])
def test_echo_tells_of_prompt_and_output(server: Server, form: str, stream: bool) -> None:
    prompt: Any = TEXT if form == "text" else server.ids(TEXT)
    fields = {"max_tokens": 6, "ignore_eos": True, "echo": True, "logprobs": 3, "return_token_ids": True}
    expected = list(server.truth(TEXT, 6, ignore_eos=True).token_ids)
    if stream:
        chunks = [c.choices[0] for c in server.complete(prompt, stream=True, **fields)]
        text = "".join(c.text for c in chunks)
        assert [t for c in chunks for t in c.token_ids] == expected
        found = chunks[0].logprobs
        for chunk in chunks[1:]:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                if chunk.logprobs is not None:
                    getattr(found, name).extend(getattr(chunk.logprobs, name))
    else:
        choice = server.complete(prompt, **fields).choices[0]
        text, found = choice.text, choice.logprobs
        assert choice.token_ids == expected
    assert text == TEXT + server.tokenizer.decode(expected, skip_special_tokens=True)
    token_ids = server.ids(TEXT) + expected
    check_columns(server, found, token_ids, 3)
    for name, start in zip(found.tokens, found.text_offset, strict=True):
        if not name.startswith(("bytes:", "<|")):
            assert text[start : start + len(name)] == name
    assert found.text_offset == sorted(found.text_offset)


def test_scoring_a_prompt_generates_nothing(server: Server) -> None:
    done = server.complete([TEXT, "how"], max_tokens=0, echo=True, logprobs=1, return_token_ids=True)
    for choice, prompt in zip(done.choices, [TEXT, "how"], strict=True):
        assert choice.text == prompt
        assert choice.token_ids == []
        assert choice.finish_reason == "length"
        check_columns(server, choice.logprobs, server.ids(prompt), 1)
    assert done.usage.completion_tokens == 0


def test_log_probabilities_of_the_output_alone(server: Server) -> None:
    choice = server.complete(TEXT, max_tokens=4, ignore_eos=True, logprobs=0, return_token_ids=True).choices[
        0
    ]
    found = choice.logprobs
    assert found.tokens == [Text(server.tokenizer).token(t).text for t in choice.token_ids]
    assert [list(top) for top in found.top_logprobs] == [[name] for name in found.tokens]
    check_told(server, found.token_logprobs, server.ids(TEXT) + choice.token_ids)


@pytest.mark.parametrize("stream", [True, False])
def test_chats_have_them_in_their_own_form(server: Server, stream: bool) -> None:
    messages = [{"role": "user", "content": TEXT}]
    fields = {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    extra = {"ignore_eos": True, "return_token_ids": True}
    if stream:
        chunks = [c.choices[0] for c in server.chat(messages, stream=True, **fields, extra_body=extra)]
        entries = [e for c in chunks if c.logprobs is not None for e in c.logprobs.content]
        token_ids = [t for c in chunks for t in c.token_ids]
    else:
        choice = server.chat(messages, **fields, extra_body=extra).choices[0]
        entries, token_ids = choice.logprobs.content, choice.token_ids
    text = Text(server.tokenizer)
    assert len(entries) == len(token_ids) == 5
    assert [bytes(e.bytes) for e in entries] == [text.token(t).raw for t in token_ids]
    assert [e.token for e in entries] == [text.token(t).text for t in token_ids]
    prompt = server.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    ids = list(prompt) + token_ids
    check_told(server, [e.logprob for e in entries], ids)
    best = reference_logprobs(server, ids, torch.float64)[len(prompt) - 1 : -1].topk(2).indices
    for entry, of_best in zip(entries, best.tolist(), strict=True):
        assert [bytes(t.bytes) for t in entry.top_logprobs] == [text.token(t).raw for t in of_best]
