"""/v1/completions through the real `openai` client, against the reference and the tokenizer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.serve.conftest import Server

TEXT = "Once upon a time there was a small village"
PROMPTS = (TEXT, "how many", "a 🦙 b")


def streamed(server: Server, prompt: Any, **fields: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    """Per choice what its chunks join to; and the usage of the last one."""
    fields |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    *chunks, last = list(server.complete(prompt, **fields))
    assert not last.choices
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert chunk.usage is None
        (choice,) = chunk.choices
        whole = joined.setdefault(choice.index, {"text": "", "token_ids": [], "finish_reason": None})
        assert whole["finish_reason"] is None, "a chunk behind the last one"
        whole["text"] += choice.text
        whole["token_ids"] += choice.token_ids
        whole["finish_reason"] = choice.finish_reason
    return joined, last.usage


def decoded(server: Server, token_ids: Any, *, skip: bool = True) -> str:
    return server.tokenizer.decode(list(token_ids), skip_special_tokens=skip)


def test_a_whole_answer_is_the_references(server: Server) -> None:
    done = server.complete(TEXT, max_tokens=20, return_token_ids=True)
    expected = server.truth(TEXT, 20)
    choice = done.choices[0]
    assert choice.token_ids == list(expected.token_ids)
    assert choice.text == decoded(server, expected.token_ids)
    assert choice.finish_reason == expected.finish_reason
    assert done.object == "text_completion"
    assert done.model == server.model_id
    assert done.id.startswith("cmpl-")
    assert done.usage.prompt_tokens == len(server.ids(TEXT))
    assert done.usage.completion_tokens == len(expected.token_ids)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_says_the_same(server: Server, skip: bool) -> None:
    joined, usage = streamed(server, TEXT, max_tokens=40, skip_special_tokens=skip, ignore_eos=True)
    expected = server.truth(TEXT, 40, ignore_eos=True)
    text = decoded(server, expected.token_ids, skip=skip)
    assert joined == {
        0: {"text": text, "token_ids": list(expected.token_ids), "finish_reason": "length"},
    }
    assert usage.completion_tokens == 40
    assert usage.prompt_tokens == len(server.ids(TEXT))


def test_sixteen_tokens_unless_told_otherwise(server: Server) -> None:
    done = server.complete([5, 6, 7], ignore_eos=True, return_token_ids=True)
    assert done.choices[0].token_ids == list(server.truth([5, 6, 7], 16, ignore_eos=True).token_ids)
    assert done.choices[0].finish_reason == "length"


@pytest.mark.parametrize("form", ["texts", "ids"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_batch_gives_choices_by_prompt_and_number(server: Server, form: str, stream: bool) -> None:
    prompts: Any = list(PROMPTS) if form == "texts" else [server.ids(p) for p in PROMPTS]
    fields = {"max_tokens": 8, "n": 2, "return_token_ids": True}
    if stream:
        choices, usage = streamed(server, prompts, **fields)
        found = {i: c["token_ids"] for i, c in choices.items()}
    else:
        done = server.complete(prompts, **fields)
        assert [c.index for c in done.choices] == list(range(6))
        found, usage = {c.index: c.token_ids for c in done.choices}, done.usage
    for i, prompt in enumerate(PROMPTS):
        assert found[2 * i] == found[2 * i + 1] == list(server.truth(prompt, 8).token_ids), prompt
    assert usage.prompt_tokens == sum(len(server.ids(p)) for p in PROMPTS)
    assert usage.completion_tokens == sum(map(len, found.values()))


def test_choices_differ_and_come_again_with_the_seed(server: Server) -> None:
    def drawn(**fields: Any) -> list[list[int]]:
        fields = {
            "max_tokens": 12,
            "temperature": 1.5,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        return [c.token_ids for c in server.complete(TEXT, **fields).choices]

    first = drawn(n=3, seed=7)
    assert all(a != b for a, b in itertools.combinations(first, 2))
    assert drawn(n=3, seed=7) == first
    assert drawn(n=1, seed=7) == first[:1], "the first choice draws with the seed itself"
    assert drawn(n=3, seed=8) != first
    assert drawn() != drawn(), "without a seed, every call draws anew"
    assert drawn(top_p=0) == drawn(temperature=0), "the fewest tokens are the best one"
    assert drawn(top_k=1) == drawn(temperature=0)
    assert drawn(top_k=-1, seed=7) == drawn(top_k=0, seed=7) == drawn(seed=7) == first[:1]


def test_parameters_reach_the_engine(server: Server) -> None:
    fields = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": -5,
        "stop": ["ab", "c"],
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "stop_token_ids": [9, 10],
        "ignore_eos": True,
        "logprobs": 2,
    }
    more = {"priority": -1, "deadline_s": 60.0, "prompt_cache_key": "me"}
    server.complete([5, 6], **fields, **more, user="nobody")
    ask = server.completer.asked[-1]
    sampling = ask.request.sampling
    known = {name: getattr(sampling, name) for name in fields}
    assert known == {**fields, "stop": ("ab", "c"), "stop_token_ids": (9, 10)}
    assert sampling.prompt_logprobs is None
    assert (ask.priority, ask.deadline_s, ask.session) == (-1, 60.0, "me")
    assert ask.request.prompt_token_ids == (5, 6)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_text_before_it(server: Server, stream: bool) -> None:
    tokens = server.truth(TEXT, 40, ignore_eos=True).token_ids
    text = decoded(server, tokens)
    # From within one token to within another, where the text has it first.
    ends = range(4, len(text) - 8)
    start = next(i for i in ends if text.find(text[i : i + 5]) == i and "\ufffd" not in text[i : i + 5])
    stop = text[start : start + 5]
    fields = {"max_tokens": 40, "ignore_eos": True, "stop": ["@@@", stop]}
    if stream:
        found, _ = streamed(server, TEXT, **fields)
        got, reason, ids = found[0]["text"], found[0]["finish_reason"], found[0]["token_ids"]
    else:
        choice = server.complete(TEXT, **fields, return_token_ids=True).choices[0]
        got, reason, ids = choice.text, choice.finish_reason, choice.token_ids
        assert choice.stop_reason == stop
    assert got == text[:start]
    assert reason == "stop"
    needed = next(n for n in range(1, 41) if stop in decoded(server, tokens[:n]).rstrip("\ufffd"))
    assert ids == list(tokens[:needed]), "the tokens that complete it are told"


def test_text_that_only_begins_like_a_stop_string_is_told(server: Server) -> None:
    tokens = server.truth(TEXT, 20, ignore_eos=True).token_ids
    text = decoded(server, tokens)
    stops = [text[i : i + 3] + "@" for i in (2, 5, len(text) - 3)]
    found, _ = streamed(server, TEXT, max_tokens=20, ignore_eos=True, stop=stops)
    assert found[0]["text"] == text
    assert found[0]["finish_reason"] == "length"


def test_a_stop_token_is_told_and_ends(server: Server) -> None:
    tokens = server.truth(TEXT, 12, ignore_eos=True).token_ids
    last = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    choice = server.complete(
        TEXT, max_tokens=12, ignore_eos=True, stop_token_ids=[tokens[last]], return_token_ids=True
    ).choices[0]
    assert choice.token_ids == list(tokens[: last + 1])
    assert choice.text == decoded(server, tokens[: last + 1])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", tokens[last])


def test_without_a_tokenizers_beginning(server: Server) -> None:
    plain = server.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    server.complete(TEXT, max_tokens=1, add_special_tokens=False)
    assert server.completer.asked[-1].request.prompt_token_ids == tuple(plain)


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_text_is_read_beside_the_loop(server: Server, stream: bool) -> None:
    text = "the traveller counted " * 100
    assert len(text) > 2000
    chunks = server.complete(text, max_tokens=4, stream=stream)
    assert sum(1 for _ in chunks) > 0 if stream else chunks.usage.prompt_tokens == len(server.ids(text))
    assert server.completer.asked[-1].request.prompt_token_ids == tuple(server.ids(text))
