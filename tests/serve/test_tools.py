"""Calls of tools: what is read of a model's text, and the form that demanded ones have."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from rayk.serve.protocol import ChatRequest
from rayk.serve.tool_forms import FORMS
from rayk.serve.tools import ListedCalls, MarkedCalls, form_of_calls
from rayk.types.structured import StructuredOutputs
from tests.grammars.test_masks import vocabulary
from tests.markers import thorough

TEXTS = (
    'a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> b',
    '<tool_call>{"name": "f", "arguments": {"x": "</t"}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
    "no call, but <tool and <tool_call",
    'not JSON <tool_call>{"name": f}</tool_call> and <tool_call>{"arguments": {}}</tool_call> nor a name',
    'cut short <tool_call>{"name": "f", "arguments": {}}',
    'cut shorter <tool_call>{"name": "f", "argu',
)


@thorough
def test_marked_calls_do_not_depend_on_how_the_text_comes() -> None:
    draws = random.Random(0)
    for text in TEXTS:
        wanted = [
            json.loads(inner)
            for inner in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.S)
            if re.fullmatch(r'\s*{"name": "\w+".*}\s*', inner, re.S)
        ]
        for _ in range(200):
            cuts = sorted({0, len(text), *(draws.randrange(len(text)) for _ in range(draws.randrange(12)))})
            reader, said, calls = MarkedCalls(FORMS["hermes"], {}), "", []
            for start, stop in zip(cuts, cuts[1:], strict=False):
                told, made = reader.feed(text[start:stop], is_last=stop == len(text))
                said, calls = said + told, calls + made
            assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
                (c["name"], c.get("arguments", {})) for c in wanted
            ]
            assert [c["index"] for c in calls] == list(range(len(calls)))
            left = re.sub(r'<tool_call>\s*{"name": "\w+".*?}\s*(</tool_call>|$)', "", text)
            assert said == ("" if left.isspace() else left)


def nested(depth: int) -> str:
    return '{"a": ' * depth + "0" + "}" * depth


ARGUMENTS = (
    '{"x": 1e999, "y": -0.10, "z": [1, {"\\u00fc,:}": "]\\\\\\","}]}',
    '{"n": ' + "7" * 5000 + "}",
    "{}",
    " { } ",
    '{"x": "\\ud83e\\udd99 🦙", "x": true}',
    nested(500),
)
"""The arguments of calls, as JSON may write them."""
NO_ARGUMENTS = ('{"x": NaN}', '{"x": -Infinity}', nested(100_000), '{"x": 1', '{"x": 01}')


def test_arguments_of_calls_are_told_as_they_are_written() -> None:
    """Python's numbers are not JSON's: some become infinite, some take too long."""
    for arguments in ARGUMENTS:
        listed = f'[{{"name":"f","parameters":{arguments}}},{{ "parameters" : {arguments}, "name":"g"}}]'
        marked = f'{{"arguments": {{}}, "name": "f", "arguments" : {arguments}\n}}'
        said, calls = ListedCalls().feed(listed, is_last=True)
        told, others = MarkedCalls(FORMS["hermes"], {}).feed(f"<tool_call>{marked}</tool_call>", is_last=True)
        assert said + told == ""
        assert [c["function"]["name"] for c in calls + others] == ["f", "g", "f"]
        assert {c["function"]["arguments"] for c in calls + others} == {arguments.strip()}
    assert ListedCalls().feed("[]", is_last=True) == ("", [])


def test_what_is_no_call_stays_text() -> None:
    for arguments in NO_ARGUMENTS:
        listed = f'[{{"name":"f","parameters":{arguments}}}]'
        marked = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert ListedCalls().feed(listed, is_last=True) == (listed, [])
        assert MarkedCalls(FORMS["hermes"], {}).feed(marked, is_last=True) == (marked, [])


@pytest.mark.parametrize("most", [1, 2, None])
def test_calls_beyond_the_most_are_left_out(most: int | None) -> None:
    marks = [f'<tool_call>{{"name": "f{i}"}}</tool_call>' for i in range(4)]
    for pieces in (["".join(marks)], marks):
        reader, names = MarkedCalls(FORMS["hermes"], {}, most), []
        for i, piece in enumerate(pieces):
            said, calls = reader.feed(piece, is_last=i == len(pieces) - 1)
            assert not said
            names += [c["function"]["name"] for c in calls]
        assert names == ["f0", "f1", "f2", "f3"][:most]


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    required = [name for name in properties if name != "next"]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


OTHER = closed(
    {"a": {"$ref": "#/$defs/x"}},
    definitions={"x": {"type": "boolean"}},
    **{"$defs": {"x": {"$anchor": "x", "type": "boolean"}}},
)
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
REFERRING: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "itself": (
        closed({"v": {"type": "integer"}, "next": {"$ref": "#"}}),
        {"v": 1, "next": {"v": 2}},
        {"v": 1, "next": []},
    ),
    "definitions": (
        closed({"a": {"$ref": "#/definitions/x"}}, definitions={"x": {"type": "integer"}}),
        {"a": 1},
        {"a": True},
    ),
    "defs": (
        closed({"a": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": {"type": "integer"}}}),
        {"a": 1},
        {"a": True},
    ),
    "anchors": (
        closed({"a": {"$ref": "#x"}}, **{"$defs": {"x": {"$anchor": "x", "type": "integer"}}}),
        {"a": 1},
        {"a": True},
    ),
    "properties": (
        closed({"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}),
        {"a": 1, "b": 2},
        {"a": 1, "b": True},
    ),
    "reference": (
        {
            "$schema": DRAFT_7,
            "$ref": "#/definitions/x",
            "definitions": {"x": closed({"next": {"$ref": "#/definitions/x"}})},
        },
        {"next": {}},
        {"next": []},
    ),
}
"""Schemas that refer to parts of themselves, what fits them, and what does not."""


@pytest.mark.parametrize("name", REFERRING)
def test_references_of_a_tools_schema_are_its_own(name: str) -> None:
    """Whatever the other tools' schemas have under the same names."""
    schema, good, bad = REFERRING[name]
    judge = jsonschema.validators.validator_for(schema)(schema)
    assert (judge.is_valid(good), judge.is_valid(bad)) == (True, False)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("g", OTHER), ("f", schema), ("h", OTHER))
    ]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        wanted = form_of_calls(
            ChatRequest.model_validate(
                {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
            )
        )
        assert wanted is not None
        for arguments, is_good in ((good, True), (bad, False)):
            answer = [{"name": "f", "parameters": arguments}] if choice == "required" else arguments
            assert takes(wanted, json.dumps(answer, separators=(",", ":"))) == is_good


def takes(wanted: StructuredOutputs, text: str) -> bool:
    """Whether the form lets a text be written byte by byte."""
    grammars, tokens = vocabulary("bytes")
    output = grammars.begin(wanted)
    for byte in text.encode():
        token = tokens.index(bytes([byte]))
        if not output.mask()[token // 32] >> (token % 32) & 1:
            return False
        output.feed(token)
    return True
