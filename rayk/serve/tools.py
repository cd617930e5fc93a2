"""Tools: what the model is told of them, and the calls in what it says.

A call that `tool_choice` demands is held to its schema by structured outputs, so any model makes it. A model
that chooses by itself writes calls in a form of its own, which its chat template shows (tool_forms.py).
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
from rayk.serve.tool_forms import Schemas, ToolForm, loaded, members, split
from rayk.types.structured import StructuredOutputs, schema_text


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


def check_tools(body: ChatRequest, template: str, form: ToolForm | None) -> None:
    """Refuse tools that the model would not see, or whose calls could not be read: `form` is that of the
    calls that it chooses to make. Raises ApiError."""
    mode = chosen(body)
    if mode == "none":
        return
    names = [t.function.name for t in body.tools or ()]
    if len(set(names)) < len(names):
        raise _bad("tools: two functions have one name", "tools")
    if "tools" not in template:
        problem = "tools are not supported: this model's chat template does not show them to it"
        raise _bad(problem, "tools", "unsupported_parameter")
    if mode == "auto" and form is None:
        problem = (
            "tools are not supported with tool_choice auto: the chat template has calls in a form that this "
            'server does not read; use tool_choice "required", or name a function (or start the server with '
            "--tool-call-parser)"
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


def make_reader(body: ChatRequest, form: ToolForm | None) -> CallReader:
    """Make what reads one choice. `form`: of calls that the model chooses to make."""
    mode, most = chosen(body), 1 if body.parallel_tool_calls is False else None
    match mode:
        case "none":
            return PlainText()
        case "auto":
            assert form is not None, "a model without one was refused"
            schemas = {tool.function.name: _parameters(tool) for tool in body.tools or ()}
            return MarkedCalls(form, schemas, most)
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
            calls = loaded(self._text)
        except (ValueError, RecursionError):
            return self._text, []
        texts = [members(text)["parameters"] for text in split(self._text)]
        return "", [self._made(call["name"], text) for call, text in zip(calls, texts, strict=True)]


class MarkedCalls(_Counting):
    """Reads calls of a form between text; what is no such call stays text."""

    def __init__(self, form: ToolForm, schemas: Schemas, most: int | None = None) -> None:
        """`most`: calls beyond so many are left out."""
        super().__init__()
        self._form = form
        self._schemas = schemas
        self._most = most
        self._left = ""
        """Text that is not told: calls, or what may be the beginning of some."""
        self._blank = ""
        """White space behind a call, or before the first where nothing else may stand there."""
        self._is_behind = form.at_start
        """Whether a call came last."""
        self._is_over = False
        """Whether no call may follow."""

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        self._left += text
        said, calls = "", []
        while (at := self._opening()) >= 0 and (stop := self._stop(at, is_last=is_last)) is not None:
            found = self._form.read(self._inner(at, stop), self._schemas)
            said += self._told(self._left[: stop if found is None else at])
            self._left = self._left[stop:]
            if found is not None:
                self._blank = ""
                self._is_behind = True
                left = len(found) if self._most is None else max(0, self._most - self.num_calls)
                calls += [self._made(*call) for call in found[:left]]
        keep = len(self._left) - at if at >= 0 else 0 if is_last else self._begun()
        at = len(self._left) - keep
        said, self._left = said + self._told(self._left[:at]), self._left[at:]
        if is_last and not self.num_calls:
            said += self._blank
        return said, calls

    def _opening(self) -> int:
        """Find where calls begin in what is left; -1: nowhere yet."""
        if not self._form.at_start:
            return self._left.find(self._form.opening)
        at = len(self._left) - len(self._left.lstrip())
        self._is_over = self._is_over or (at < len(self._left) and self._left[at] != self._form.opening)
        return -1 if self._is_over or at == len(self._left) else at

    def _stop(self, at: int, *, is_last: bool) -> int | None:
        """Find where the calls that begin at `at` end; None: not yet."""
        closing = self._form.closing or self._form.opening
        end = -1 if self._form.at_start else self._left.find(closing, at + len(self._form.opening))
        if end >= 0:
            return end + len(self._form.closing)
        return len(self._left) if is_last else None

    def _inner(self, at: int, stop: int) -> str:
        if self._form.at_start:
            return self._left[at:stop].strip()
        return self._left[at + len(self._form.opening) : stop].removesuffix(self._form.closing)

    def _begun(self) -> int:
        """Count the characters at the end of what is left that calls may begin with."""
        return 0 if self._form.at_start else overlap(self._left, self._form.opening)

    def _told(self, text: str) -> str:
        """Leave white space behind a call out, unless other text follows: it is of the form."""
        text, self._blank = self._blank + text, ""
        if not self._is_behind or text.strip():
            self._is_behind = self._is_behind and not text
            return text
        self._blank = text
        return ""


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
