"""Tools: what the model is told of them, and the calls in what it says.

A call that `tool_choice` demands is held to its schema by structured outputs, so any model makes it. A model
that chooses by itself writes calls in a form of its own, which its chat template shows: Hermes' is read here,
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which Qwen's and others' have, too.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rayk.serve.choices import overlap
from rayk.serve.errors import ApiError
from rayk.serve.protocol import ChatRequest, NamedTool, Tool
from rayk.serve.responses import ToolCall
from rayk.serve.structured import schema_text
from rayk.types.structured import StructuredOutputs

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Stand around a call in Hermes' form."""
OTHER_FORMS = ("<function=", "<arg_key>", "<parameter=")
"""What templates of other forms between the same marks have."""


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
    functions = [t.function for t in body.tools or () if mode in ("required", t.function.name)]
    definitions: dict[str, Any] = {}
    schemas = {f.name: _without_definitions(f.parameters, definitions) for f in functions}
    if mode != "required":
        return _form({**schemas[mode], "$defs": definitions})
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
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

    def _made(self, name: str, arguments: Any) -> ToolCall:
        self.num_calls += 1
        return _call(self.num_calls - 1, name, json.dumps(arguments, ensure_ascii=False))


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
            calls = json.loads(self._text)
        except ValueError:
            return self._text, []
        return "", [self._made(call["name"], call["parameters"]) for call in calls]


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


def _parsed(text: str) -> tuple[str, Any] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return (call["name"], arguments) if isinstance(arguments, dict) else None


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


def _without_definitions(schema: dict[str, Any] | None, definitions: dict[str, Any]) -> dict[str, Any]:
    """Move a schema's definitions to where references find them. Raises ApiError where two differ."""
    own = dict(schema) if schema is not None else {"type": "object", "additionalProperties": False}
    found = own.pop("$defs", {})
    if not isinstance(found, dict):
        raise _bad("tools: $defs of a schema is an object", "tools")
    for name, definition in found.items():
        if definitions.setdefault(name, definition) != definition:
            raise _bad(f"tools: two functions define {name[:100]!r} in different ways", "tools")
    return own


def _bad(problem: str, param: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, problem, param=param, code=code)
