"""Answers of a form, and calls of tools, over HTTP with OpenAI's client; `jsonschema` and `re` judge them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jsonschema
import openai
import pytest

from rayk.oracle.tokenizer import CHAT_TEMPLATE, build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.text import Text
from rayk.types.serving import ModelCard
from tests.completer import ScriptedCompleter, serve, tokens_then_end
from tests.grammars.test_masks import PERSON
from tests.markers import thorough
from tests.serve.conftest import Server

MESSAGES: Any = [{"role": "user", "content": "how many?"}]
SHORT: dict[str, Any] = {"enum": [1, "two", {"three": [3]}, None]}

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Paris"]}, "place": {"$ref": "#/$defs/place"}},
    "required": ["city", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3}},
}
WHEN: dict[str, Any] = {
    "type": "object",
    "properties": {"utc": {"type": "boolean"}},
    "required": ["utc"],
    "additionalProperties": False,
}
PARAMETERS = {"weather": CITY, "time": WHEN, "nothing": None}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in PARAMETERS.items()
]
HERMES = (
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% if tools %}Answer with <tool_call>{...}</tool_call>.\n{% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}"
) + CHAT_TEMPLATE
"""The form that Qwen's templates ask for."""


@contextmanager
def with_template(server: Server, template: str) -> Iterator[openai.OpenAI]:
    """The server's engine behind a template of its own."""
    tokenizer = build_tokenizer(server.completer.model.vocab_size, adds_bos=False)
    tokenizer.chat_template = template
    with (
        serve(make_app(server.completer, text=Text(tokenizer))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def tools(server: Server) -> Iterator[Any]:
    """Chats with a server that shows tools, greedy unless told otherwise."""
    with with_template(server, HERMES) as client:

        def chat(**fields: Any) -> Any:
            fields = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, **fields}
            return client.chat.completions.create(model=server.model_id, **fields)

        yield chat


def test_answers_fit_their_schema_and_streams_are_the_same(server: Server) -> None:
    extra = {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}
    fields: Any = {"n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 900, "extra_body": extra}
    whole = server.chat(MESSAGES, **fields)
    texts = ["", "", ""]
    for chunk in server.chat(MESSAGES, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [c.message.content for c in whole.choices] == texts
    assert [c.finish_reason for c in whole.choices] == ["stop"] * 3
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) == 3


@thorough
def test_openais_and_vllms_fields_ask_for_the_same(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SHORT}}
    answers = [
        server.chat(MESSAGES, response_format=schema),
        server.chat(MESSAGES, extra_body={"structured_outputs": {"json": SHORT}}),
        server.chat(MESSAGES, extra_body={"structured_outputs": {"json": json.dumps(SHORT)}}),
    ]
    said = {a.choices[0].message.content for a in answers}
    assert len(said) == 1
    jsonschema.validate(json.loads(said.pop()), SHORT)
    asked = {a.request.sampling.structured_outputs for a in server.completer.asked[-2:]}
    assert len({json.dumps(json.loads(form.json)) for form in asked}) == 1
    for form, fits in (
        ({"regex": "[ab]{3}-[0-9]+x"}, lambda t: re.fullmatch("[ab]{3}-[0-9]+x", t)),
        ({"choice": ["yes", "no"]}, lambda t: t in ("yes", "no")),
        (
            {"grammar": 'root ::= "(" root ")" | "x"'},
            lambda t: t == "(" * (len(t) // 2) + "x" + ")" * (len(t) // 2),
        ),
        ({"json_object": True}, lambda t: json.loads(t) is not None),
    ):
        done = server.complete("Once", max_tokens=200, structured_outputs=form, temperature=1.0, seed=3)
        text, reason = done.choices[0].text, done.choices[0].finish_reason
        assert reason in ("stop", "length")
        assert reason == "length" or fits(text), (form, text)


@thorough
def test_any_json_object(server: Server) -> None:
    """A random model seldom ends one: what begins as one is all that can be asked of most."""
    done = server.chat(MESSAGES, response_format={"type": "json_object"}, temperature=1.0, n=4, max_tokens=60)
    for choice in done.choices:
        text = choice.message.content
        assert text.lstrip().startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        "response_format",
        "response_format.json_schema.schema: Invalid type: objekt.*mend",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "nothing"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "regex.*unclosed.*mend"),
    ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs", "more than 131072"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "use grammar"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "disable_any_whitespace"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "string"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "one of them",
    ),
    ({"guided_json": {}}, "guided_json", 'structured_outputs: {"json": ...}'),
    ({"guided_regex": "a"}, "guided_regex", "structured_outputs"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "no backends"),
    (
        {"structured_outputs": {"regex": "a"}, "min_tokens": 3, "ignore_eos": True},
        "min_tokens",
        "not supported",
    ),
]


@pytest.mark.parametrize(("fields", "param", "problem"), BAD, ids=[str(f)[:40] for f, _, _ in BAD])
def test_what_cannot_be_held_to_is_refused_before_it_is_placed(
    server: Server, fields: dict[str, Any], param: str, problem: str
) -> None:
    num_asked = len(server.completer.asked)
    for ask in (
        lambda: server.chat(MESSAGES, extra_body=fields),
        lambda: server.complete("x", **fields),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.param == param
        assert re.search(
            problem if "{" not in problem else re.escape(problem), caught.value.body["message"], re.S
        )  # type: ignore[index]
    assert len(server.completer.asked) == num_asked


def fits(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, PARAMETERS[call.function.name] or {"maxProperties": 0})
    return call.id.startswith("call_") and call.type == "function"


@thorough
def test_demanded_calls_fit_their_functions(tools: Any) -> None:
    done = tools(
        tool_choice="required", n=6, temperature=3.0, seed=1, max_tokens=600, parallel_tool_calls=False
    )
    for choice in done.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert fits(call)
    assert len({c.message.tool_calls[0].function.name for c in done.choices}) > 1
    named = tools(tool_choice={"type": "function", "function": {"name": "weather"}}, temperature=1.0, seed=2)
    assert named.choices[0].finish_reason == "stop", "as OpenAI's"
    (call,) = named.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert fits(call)


@thorough
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_streamed_calls_are_those_of_the_whole_answer(tools: Any, choice: Any) -> None:
    fields = {"tool_choice": choice, "temperature": 1.0, "seed": 5, "max_tokens": 600}
    whole = tools(**fields).choices[0]
    streamed: dict[int, list[str]] = {}
    reasons = []
    for chunk in tools(stream=True, **fields):
        for part in chunk.choices:
            assert not part.delta.content
            reasons.append(part.finish_reason)
            for call in part.delta.tool_calls or ():
                name_and_arguments = streamed.setdefault(call.index, ["", ""])
                name_and_arguments[0] += call.function.name or ""
                name_and_arguments[1] += call.function.arguments
    assert list(streamed.values()) == [
        [c.function.name, c.function.arguments] for c in whole.message.tool_calls
    ]
    assert reasons[-1] == whole.finish_reason


@thorough
def test_calls_that_the_model_chooses_are_read_from_its_text(server: Server) -> None:
    """And what others answered to calls goes to the template."""
    said = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    said += '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    tokenizer = build_tokenizer(600, adds_bos=False)
    tokenizer.chat_template = HERMES
    card = ModelCard(model_id="tiny", folder="nowhere", vocab_size=600, max_positions=8192)
    completer = ScriptedCompleter(card, tokens_then_end(tokenizer(said)["input_ids"]))
    before: Any = [
        *MESSAGES,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    with (
        serve(make_app(completer, text=Text(tokenizer))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        done = client.chat.completions.create(model="tiny", messages=before, tools=TOOLS).choices[0]
        stream = client.chat.completions.create(model="tiny", messages=before, tools=TOOLS, stream=True)
        parts = [chunk.choices[0] for chunk in stream]
        plain = client.chat.completions.create(model="tiny", messages=before, tools=TOOLS, tool_choice="none")
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in done.message.tool_calls or ()]  # type: ignore[union-attr]
    assert calls == [("weather", {"city": "Köln"}), ("time", {})]
    assert (done.message.content, done.finish_reason) == ("Let me see. ", "tool_calls")
    assert "".join(p.delta.content or "" for p in parts) == "Let me see. "
    assert [c.function.name for p in parts for c in p.delta.tool_calls or ()] == ["weather", "time"]  # type: ignore[union-attr]
    assert parts[-1].finish_reason == "tool_calls"
    assert plain.choices[0].message.content == said
    assert plain.choices[0].message.tool_calls is None
    prompt = tokenizer.decode(completer.asked[0].request.prompt_token_ids)
    assert "<tool_call>weather Paris</tool_call>" in prompt
    assert '"name": "time"' in prompt
    assert "rain" in prompt
    assert completer.asked[0].request.sampling.structured_outputs is None, "the model is free"


def test_calls_behind_special_tokens_are_read(server: Server) -> None:
    """Which answers leave out: Mistral's begin with one."""
    marks = ["[TOOL_CALLS]", "[ARGS]"]
    tokenizer = build_tokenizer(600, adds_bos=False)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}[TOOL_CALLS]" + CHAT_TEMPLATE
    )
    said = 'Sí 🦙.[TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]time[ARGS]{}'
    card = ModelCard(model_id="tiny", folder="nowhere", vocab_size=700, max_positions=8192)
    completer = ScriptedCompleter(card, tokens_then_end(tokenizer(said)["input_ids"]))
    with (
        serve(make_app(completer, text=Text(tokenizer))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        ask: Any = partial(client.chat.completions.create, model="tiny", messages=MESSAGES)
        done = ask(tools=TOOLS).choices[0]
        parts = [chunk.choices[0] for chunk in ask(tools=TOOLS, stream=True)]
        plain = ask(tools=TOOLS, tool_choice="none")
    calls = [(c.function.name, c.function.arguments) for c in done.message.tool_calls]
    assert calls == [("weather", '{"city": "Köln"}'), ("time", "{}")]
    assert (done.message.content, done.finish_reason) == ("Sí 🦙.", "tool_calls")
    assert "".join(p.delta.content or "" for p in parts) == "Sí 🦙."
    assert [c.function.name for p in parts for c in p.delta.tool_calls or ()] == ["weather", "time"]
    assert plain.choices[0].message.content == said.replace("[TOOL_CALLS]", "").replace("[ARGS]", "")


BAD_TOOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "no tool is named 'g'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
    ({"tools": TOOLS[:1] * 2}, "tools", "one name"),
    ({"tools": TOOLS * 50}, "tools", "128"),
    ({"response_format": {"type": "json_object"}}, "tools", "exclude each other"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
        },
        "tools",
        "tools: Invalid type: objekt",
    ),
]


@pytest.mark.parametrize(("fields", "param", "problem"), BAD_TOOLS, ids=[p for _, _, p in BAD_TOOLS])
def test_tools_that_make_no_sense_are_refused(
    tools: Any, server: Server, fields: dict[str, Any], param: str, problem: str
) -> None:
    num_asked = len(server.completer.asked)
    with pytest.raises(openai.BadRequestError, match=problem) as caught:
        tools(**fields)
    assert caught.value.param == param
    assert len(server.completer.asked) == num_asked


@thorough
@pytest.mark.parametrize("mark", ["<function=", "<|call|>"])
def test_calls_in_a_form_that_is_not_read_can_only_be_demanded(server: Server, mark: str) -> None:
    template = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + mark + CHAT_TEMPLATE
    with with_template(server, template) as client:
        fields: Any = {"model": server.model_id, "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
        with pytest.raises(openai.BadRequestError, match='use tool_choice "required"'):
            client.chat.completions.create(**fields)
        done = client.chat.completions.create(**fields, tool_choice="required", max_tokens=600)
        assert done.choices[0].finish_reason == "tool_calls"
