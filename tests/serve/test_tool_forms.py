"""The forms in which models write calls: what is read of a text, however it comes."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rayk.serve.tool_forms import FORMS, check_parser, tool_form
from rayk.serve.tools import MarkedCalls
from rayk.types.errors import UserError
from tests.markers import needs_vllm, thorough

NOW = {"anyOf": [{"type": "boolean"}, {"type": ["number"]}]}
SCHEMAS = {
    "weather": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "now": NOW, "note": {}}
    },
    "time": {"properties": {"zone": {"type": ["string", "null"]}}},
}
COLOGNE, ZONE = {"city": "Köln {}<]", "days": 3}, {"zone": None}
FIRST, SECOND = json.dumps(COLOGNE, ensure_ascii=False), json.dumps(ZONE)
BOTH = [("weather", COLOGNE), ("time", ZONE)]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, DONE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def as_hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def as_qwen3_coder(name: str, arguments: str) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in json.loads(arguments).items()}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def as_deepseek(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{DONE}"


def twice(write: Callable[[str, str], str], between: str = "\n") -> str:
    return write("weather", FIRST) + between + write("time", SECOND)


CASES: list[tuple[str, str, str, list[tuple[str, object]]]] = [
    ("hermes", f"I look. {twice(as_hermes)}\n", "I look. ", BOTH),
    ("qwen3_coder", f"I look. {twice(as_qwen3_coder)}\n", "I look. ", BOTH),
    ("qwen3_coder", "<tool_call><function=nothing>\n</function></tool_call>", "", [("nothing", {})]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=now>\nTrue\n</parameter>\n<parameter=days>\nsoon\n"
        "</parameter>\n<parameter=city>\n5\n</parameter>\n<parameter=note>\n5\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("weather", {"now": True, "days": "soon", "city": "5", "note": "5"})],
    ),
    ("llama3_json", f'{{"name": "weather", "parameters": {FIRST}}}', "", BOTH[:1]),
    (
        "llama3_json",
        f'\n {{"name": "weather", "parameters": {FIRST}}}; {{"name": "time", "parameters": {SECOND}}}\n',
        "",
        BOTH,
    ),
    (
        "mistral",
        f'I look.[TOOL_CALLS] [{{"name": "weather", "arguments": {FIRST}}}, '
        f'{{"name": "time", "arguments": {SECOND}}}]',
        "I look.",
        BOTH,
    ),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{FIRST}[TOOL_CALLS]time{SECOND}", "", BOTH),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{FIRST}\n", "", BOTH[:1]),
    ("deepseek_v3", f"I look.{BEGIN}{twice(as_deepseek)}{END}", "I look.", BOTH),
    (
        "deepseek_v31",
        f"{BEGIN}{CALL}weather{SEP}{FIRST}{DONE}{CALL}time{SEP}{SECOND}{DONE}{END}",
        "",
        BOTH,
    ),
]
WITH_VLLM = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

class Tokenizer:
    def get_vocab(self):
        return AnyWord()

class AnyWord(dict):
    def get(self, word, default=None):
        return 1

asked = json.load(sys.stdin)
tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in asked["schemas"].items()]
request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=tools)
for name, text in asked["texts"]:
    parser = ToolParserManager.get_tool_parser(name)(Tokenizer(), request.tools)
    found = parser.extract_tool_calls(text, request)
    print(json.dumps([[c.function.name, json.loads(c.function.arguments)] for c in found.tool_calls]))
"""
"""Reads texts from stdin with vLLM's own parsers."""
NO_CALLS = (
    ("llama3_json", 'The answer is {"name": "weather", "parameters": {}}'),
    ("llama3_json", ' {"city": "Köln"}'),
    ("llama3_json", '{"name": "weather", "parameters": {}} and more'),
    ("llama3_json", '{"name": "weather", "parameters": {"city": '),
    ("llama3_json", " \n"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{"),
    ("mistral", '[TOOL_CALLS] [{"name": 5}]'),
    ("mistral", "[TOOL_CALLS"),
    ("mistral", "[TOOL_CALLS] []"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>"),
    ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>'),
    ("deepseek_v3", f"{BEGIN}{CALL}function{SEP}weather\n{FIRST}{DONE}{END}"),
    ("deepseek_v3", f"{BEGIN}{END}"),
    ("deepseek_v31", f"{BEGIN}{CALL}weather{SEP}{FIRST}"),
)


def read(name: str, pieces: Sequence[str], most: int | None = None) -> tuple[str, list[tuple[str, object]]]:
    reader, said, calls = MarkedCalls(FORMS[name], SCHEMAS, most), "", []
    for i, piece in enumerate(pieces):
        told, made = reader.feed(piece, is_last=i == len(pieces) - 1)
        said, calls = said + told, calls + made
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return said, [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES)
def test_calls_are_read_in_every_form(
    name: str, text: str, said: str, calls: list[tuple[str, object]]
) -> None:
    assert read(name, [text]) == (said, calls)
    assert read(name, [text], most=1) == (said, calls[:1])


@needs_vllm
@thorough
def test_vllms_parsers_read_the_same_calls(vllm_python: Path) -> None:
    """But those that only its parser for Mistral's own tokenizer knows."""
    cases = [case for case in CASES if "[TOOL_CALLS]weather" not in case[1]]
    asked = {"texts": [case[:2] for case in cases], "schemas": {**SCHEMAS, "nothing": {"type": "object"}}}
    done = subprocess.run(
        [vllm_python, "-c", WITH_VLLM], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [[list(call) for call in case[3]] for case in cases]


def test_schemas_may_be_anything() -> None:
    text = "<tool_call><function=f><parameter=x>5</parameter></function></tool_call>"
    for schema in ({}, {"properties": 5}, {"properties": {"x": 5}}, *(
        {"properties": {"x": {key: value}}} for key in ("type", "anyOf") for value in (5, None, {}, [5], "x")
    )):  # fmt: skip
        reader = MarkedCalls(FORMS["qwen3_coder"], {"f": schema})
        said, (call,) = reader.feed(text, is_last=True)
        assert said == ""
        assert json.loads(call["function"]["arguments"])["x"] in (5, "5")


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert read(name, [text]) == (text, [])


@pytest.mark.parametrize(("name", "text"), [*((c[0], c[1]) for c in CASES), *NO_CALLS])
def test_streams_are_the_whole_text_read_at_once(name: str, text: str) -> None:
    """Wherever it is cut, an empty last piece included, as one with a finish reason alone has."""
    whole, draws = read(name, [text]), random.Random(0)
    for at in range(len(text) + 1):
        assert read(name, [text[:at], text[at:]]) == whole, at
    assert read(name, [*text, ""]) == whole
    for _ in range(50):
        cuts = sorted({0, len(text), *(draws.randrange(len(text)) for _ in range(draws.randrange(12)))})
        assert read(name, [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]) == whole, cuts


@pytest.mark.parametrize("name", FORMS)
def test_text_that_begins_no_call_is_told_at_once(name: str) -> None:
    reader = MarkedCalls(FORMS[name], SCHEMAS)
    assert [reader.feed(c, is_last=False) for c in "It rains. "] == [(c, []) for c in "It rains. "]


@pytest.mark.parametrize("name", FORMS)
def test_long_texts_that_are_no_calls_take_no_long_time(name: str) -> None:
    """Of every mark 20,000: a reader that looked back for each would take minutes."""
    form = FORMS[name]
    for unit in (*form.all_marks, "{", '{"name": "f", "arguments": {}} ', "<parameter=x>", "\n;"):
        text = form.opening + unit * 20_000
        said, calls = read(name, [text])
        assert said == text or calls


TEMPLATES = {
    "hermes": "<tools></tools> ... <tool_call>\n{'name': ...}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=p>\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument}.',
    "mistral": "{{ '[AVAILABLE_TOOLS]' }} ... {{ '[TOOL_CALLS]' }}",
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '```json'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'",
}
"""What the models' chat templates have of their calls."""


def test_a_template_shows_its_form() -> None:
    for name, template in TEMPLATES.items():
        assert tool_form("auto", template) is FORMS[name]
    others = (
        "{{ tools }}",
        "<tool_call>f<arg_key>x</arg_key></tool_call>",
        "<function=f>",
        "<|tool_call_start|>",
    )
    assert [tool_form("auto", template) for template in others] == [None] * len(others)
    assert tool_form("mistral", "<tool_call></tool_call>") is FORMS["mistral"]


def test_a_form_that_is_not_known_is_named() -> None:
    assert [check_parser(name) for name in ("auto", *FORMS)] == ["auto", *FORMS]
    with pytest.raises(UserError, match=r"(?s)'pythonic'.*--tool-call-parser|--tool-call-parser.*'pythonic'"):
        check_parser("pythonic")
