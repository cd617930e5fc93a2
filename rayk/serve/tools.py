"""Tools: what the model is told of them, and the calls in what it says.

A call that `tool_choice` demands is held to its schema by structured outputs, so any model makes it. A model
that chooses by itself writes calls in a form of its own, which its chat template shows: Hermes' is read here,
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which Qwen's and others' have, too.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rayk.serve.choices import overlap
from rayk.serve.errors import ApiError
from rayk.serve.protocol import ChatRequest, NamedTool, Tool
from rayk.serve.responses import ToolCall
from rayk.types.structured import StructuredOutputs, schema_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Stand around a call in Hermes' form."""
OTHER_FORMS = ("<function=", "<arg_key>", "<parameter=")
"""What templates of other forms between the same marks have."""

_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},:]', re.DOTALL)
"""What structures JSON, and texts in one piece."""


class CallReader(Protocol):
    """Reads one choice's text as it grows."""

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Return what of it the model says, and what it calls; a stream's parts of a call share an index."""

    def reason(self, reason: str | None) -> str | None:
        """Return the finish reason as clients are told it."""


def chosen(body: ChatRequest) -> str:
    """Return the mode: none, auto, required, or the name of a function. Raises ApiError."""
    choice, tools = body.tool_choice, body.tools
    if not tools:
        if choice not in (None, "none", "auto"):
            raise _bad("tool_choice needs tools", "tool_choice")
        return "none"
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in {t.function.name for t in tools}:
            raise _bad(f"tool_choice: no tool is named {name[:100]!r}", "tool_choice")
        return name
    return choice or "auto"


def check_tools(body: ChatRequest, template: str) -> None:
    """Refuse tools that the model would not see, or whose calls could not be read. Raises ApiError."""
    mode = chosen(body)
    if mode == "none":
        return
    names = [t.function.name for t in body.tools or ()]
    if len(set(names)) < len(names):
        raise _bad("tools: two functions have one name", "tools")
    if "tools" not in template:
        problem = "tools are not supported: this model's chat template does not show them to it"
        raise _bad(problem, "tools", "unsupported_parameter")
    if mode == "auto" and not _is_hermes(template):
        problem = (
            "tools are not supported with tool_choice auto: the chat template has calls in a form that this "
            'server does not read; use tool_choice "required", or name a function'
        )
        raise _bad(problem, "tools", "unsupported_parameter")
    asked = body.response_format
    if body.structured_outputs is not None or (asked is not None and asked.type != "text"):
        raise _bad("tools and a form of the answer exclude each other: a call has one of its own", "tools")


def form_of_calls(body: ChatRequest) -> StructuredOutputs | None:
    """Return the form that demanded calls have; None: none is demanded. Raises ApiError."""
    mode = chosen(body)
    if mode in ("none", "auto"):
        return None
    schemas = {tool.function.name: _parameters(tool) for tool in body.tools or ()}
    if mode != "required":
        return _form(schemas[mode])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    definitions = {name: _within(schema, name) for name, schema in schemas.items()}
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    return _form({"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions})


def _form(schema: dict[str, Any]) -> StructuredOutputs:
    """Nobody reads a call's white space."""
    return StructuredOutputs(json=schema_text(schema), disable_any_whitespace=True)


def make_reader(body: ChatRequest) -> CallReader:
    """Make what reads one choice."""
    mode, most = chosen(body), 1 if body.parallel_tool_calls is False else None
    match mode:
        case "none":
            return PlainText()
        case "auto":
            return MarkedCalls(most)
        case "required":
            return ListedCalls()
    return OneCall(mode)


def plain_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates know it: arguments of calls are objects, which OpenAI's clients send as
    JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_plain_call(call) for call in calls]}


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """List tools as templates know them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


class PlainText:
    """Reads no calls."""

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        return text, []

    def reason(self, reason: str | None) -> str | None:
        return reason


class OneCall(PlainText):
    """Reads the arguments of one function, which are all that there is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_first = True

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        if self._is_first:
            self._is_first = False
            return "", [_call(0, self._name, text)]
        return "", [{"index": 0, "function": {"arguments": text}}] if text else []


class _Counting:
    def __init__(self) -> None:
        self.num_calls = 0

    def reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def _made(self, name: str, arguments: str) -> ToolCall:
        self.num_calls += 1
        return _call(self.num_calls - 1, name, arguments)


class ListedCalls(_Counting):
    """Reads a JSON array of calls, once it is complete; one that is cut short stays text."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        self._text += text
        if not is_last:
            return "", []
        try:
            calls = _loaded(self._text)
        except (ValueError, RecursionError):
            return self._text, []
        texts = [_members(text)["parameters"] for text in _split(self._text)]
        return "", [self._made(call["name"], text) for call, text in zip(calls, texts, strict=True)]


class MarkedCalls(_Counting):
    """Reads calls of Hermes' form between text; what is no such call stays text."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: calls beyond so many are left out."""
        super().__init__()
        self._most = most
        self._left = ""
        """Text that is not told: a call, or what may be the beginning of one."""
        self._blank = ""
        """White space behind a call."""
        self._is_behind = False
        """Whether a call came last."""

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        self._left += text
        said, calls = "", []
        while (at := self._left.find(OPEN)) >= 0:
            end = self._left.find(CLOSE, at)
            if end < 0 and not is_last:
                break
            stop = end + len(CLOSE) if end >= 0 else len(self._left)
            call = _parsed(self._left[at + len(OPEN) : end if end >= 0 else stop])
            said += self._told(self._left[: stop if call is None else at])
            self._left = self._left[stop:]
            if call is not None:
                self._blank = ""
                self._is_behind = True
                if self._most is None or self.num_calls < self._most:
                    calls.append(self._made(*call))
        keep = len(self._left) - at if at >= 0 else 0 if is_last else overlap(self._left, OPEN)
        at = len(self._left) - keep
        said, self._left = said + self._told(self._left[:at]), self._left[at:]
        return said, calls

    def _told(self, text: str) -> str:
        """Leave white space behind a call out, unless other text follows: it is of the form."""
        text, self._blank = self._blank + text, ""
        if not self._is_behind or text.strip():
            self._is_behind = self._is_behind and not text
            return text
        self._blank = text
        return ""


def _parsed(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call, as they are written; None: it is no call."""
    try:
        call = _loaded(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    key = "arguments" if "arguments" in call else "parameters"
    return (call["name"], _members(text).get(key, "{}")) if isinstance(call.get(key, {}), dict) else None


def _loaded(text: str) -> Any:
    """Read JSON but for its numbers, of which Python does not take all. Raises ValueError, RecursionError."""
    return json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _members(text: str) -> dict[str, str]:
    """Find the values of a JSON object, as they are written."""
    parts = _split(text)
    return {json.loads(key): value for key, value in zip(parts[::2], parts[1::2], strict=True)}


def _split(text: str) -> list[str]:
    """Split a JSON array or object at its own commas and colons."""
    marks, depth, parts = _MARK.finditer(text), 1, []
    begin = next(marks).end()
    for mark in marks:
        depth += (mark[0] in ("[", "{")) - (mark[0] in ("]", "}"))
        if depth == 0 or (depth == 1 and mark[0] in (",", ":")):
            parts.append(text[begin : mark.start()].strip())
            begin = mark.end()
    return parts if parts != [""] else []


def _is_hermes(template: str) -> bool:
    return OPEN in template and CLOSE in template and not any(mark in template for mark in OTHER_FORMS)


def _call(index: int, name: str, arguments: str) -> ToolCall:
    function: Any = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if function is None or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _bad(f"messages: the arguments of a tool call are no JSON: {error}", "messages") from None
    return {**call, "function": {**function, "arguments": parsed}}


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a call's arguments: of none where the tool names none."""
    given = tool.function.parameters
    return {"type": "object", "additionalProperties": False} if given is None else given


def _within(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Make a schema part of another, a document of its own there: "#" and what begins with it stays within.
    Only drafts since 2019 let a schema that is a mere reference have an id."""
    return {**{key: value for key, value in schema.items() if key != "$schema"}, "$id": f"tool:{name}"}


def _bad(problem: str, param: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, problem, param=param, code=code)
