"""The forms in which models write the calls of tools that they choose to make, by names of vLLM's parsers.

A form is a row of FORMS: the mark where calls begin, the one where they end, and what reads the text between.
Texts are the models': whatever they hold, they are read in a time that grows with their length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rayk.types.errors import UserError

Calls = list[tuple[str, str]]
"""(name, arguments as JSON text) of each call."""
Schemas = Mapping[str, Mapping[str, Any]]
"""Function -> the schema of its arguments."""
Reader = Callable[[str, Schemas], Calls | None]

_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},:]', re.DOTALL)
"""What structures JSON, and texts in one piece."""
_BETWEEN = re.compile(r"[\s;]*")
"""Stands between Llama's calls."""
AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """How calls are written."""

    opening: str
    """Begins calls."""
    closing: str = ""
    """Ends them; empty: the next opening does, or the end of the text."""
    at_start: bool = False
    """Whether an answer is calls from its beginning to its end, or none; `opening` is then part of them."""
    read: Reader
    """Reads what stands between the marks; None: it is no call."""
    shown_by: Callable[[str], bool]
    """Whether a chat template asks for calls of this form."""
    marks: tuple[str, ...] = ()
    """What else has a meaning; like opening and closing, it may be a special token, which is not told."""

    @property
    def all_marks(self) -> tuple[str, ...]:
        """Name the texts without which no call is found."""
        return tuple(mark for mark in (self.opening, self.closing, *self.marks) if mark)


def tool_form(name: str, template: str) -> ToolForm | None:
    """Find a form by its name, or with `auto` that of a chat template; None: it has none that is known."""
    if name != AUTO:
        return FORMS[name]
    return next((form for form in FORMS.values() if form.shown_by(template)), None)


def check_parser(name: str) -> str:
    """Return the name of a form. Raises UserError for another."""
    if name != AUTO and name not in FORMS:
        mend = f"one of {', '.join((AUTO, *FORMS))}"
        raise UserError(f"calls of tools are not read as {name!r}", where="--tool-call-parser", mend=mend)
    return name


# --- JSON as it is written ----------------------------------------------------------------------------------


def loaded(text: str) -> Any:
    """Read JSON; its numbers, of which Python does not take all, become 0. Raises ValueError,
    RecursionError."""
    return _DECODER.decode(text)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _zero(_: str) -> int:
    return 0


_DECODER = json.JSONDecoder(parse_int=_zero, parse_float=_zero, parse_constant=_refuse_constant)


def members(text: str) -> dict[str, str]:
    """Find the values of a JSON object, as they are written."""
    parts = split(text)
    return {json.loads(key): value for key, value in zip(parts[::2], parts[1::2], strict=True)}


def split(text: str) -> list[str]:
    """Split a JSON array or object at its own commas and colons."""
    marks, depth, parts = _MARK.finditer(text), 1, []
    begin = next(marks).end()
    for mark in marks:
        depth += (mark[0] in ("[", "{")) - (mark[0] in ("]", "}"))
        if depth == 0 or (depth == 1 and mark[0] in (",", ":")):
            parts.append(text[begin : mark.start()].strip())
            begin = mark.end()
    return parts if parts != [""] else []


def _is_object(text: str) -> bool:
    try:
        return isinstance(loaded(text), dict)
    except (ValueError, RecursionError):
        return False


# --- what reads calls ---------------------------------------------------------------------------------------


def _one(text: str, schemas: Schemas) -> Calls | None:
    """Read {"name": ..., "arguments": {...}}; the arguments may be called parameters."""
    try:
        call = loaded(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    key = "arguments" if "arguments" in call else "parameters"
    if not isinstance(call.get(key, {}), dict):
        return None
    return [(call["name"], members(text).get(key, "{}"))]


def _all(texts: Sequence[str], read: Reader, schemas: Schemas) -> Calls | None:
    """Read one call of each text; None if there is none, or one of them is no call."""
    found = [read(text, schemas) for text in texts]
    calls = [call for calls in found if calls is not None for call in calls]
    return calls if calls and None not in found else None


def _objects(text: str, schemas: Schemas) -> Calls | None:
    """Read objects, with semicolons between them."""
    texts, at = [], 0
    try:
        while at < len(text):
            end = _DECODER.raw_decode(text, at)[1]
            texts.append(text[at:end])
            at = _after(text, end)
    except (ValueError, RecursionError):
        return None
    return _all(texts, _one, schemas)


def _after(text: str, end: int) -> int:
    between = _BETWEEN.match(text, end)
    return end if between is None else between.end()


def _mistral(text: str, schemas: Schemas) -> Calls | None:
    """Read an array of calls, or as newer releases write one, its name and then its arguments."""
    text = text.strip()
    if text.startswith("["):
        try:
            is_array = isinstance(loaded(text), list)
        except (ValueError, RecursionError):
            is_array = False
        return _all(split(text), _one, schemas) if is_array else None
    head, brace, rest = text.partition("{")
    name = head.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
    return [(name, brace + rest)] if name and _is_object(brace + rest) else None


def _qwen3_coder(text: str, schemas: Schemas) -> Calls | None:
    """Read <function=NAME>, each argument in <parameter=KEY>: text where the schema says so, else JSON."""
    head, *arguments = text.strip().removesuffix("</function>").split("<parameter=")
    name = head.strip().removeprefix("<function=").removesuffix(">")
    if not head.startswith("<function=") or not name or ">" in name:
        return None
    properties = schemas.get(name, {}).get("properties")
    values = {}
    for argument in arguments:
        key, is_there, value = argument.partition(">")
        value, is_closed, _ = value.rpartition("</parameter>")
        if not is_there or not is_closed:
            return None
        values[key] = _typed(
            value.removeprefix("\n").removesuffix("\n"),
            properties.get(key) if isinstance(properties, dict) else None,
        )
    written = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
    return [(name, f"{{{written}}}")]


def _typed(value: str, schema: Any) -> str:
    """Write an argument as JSON: as text, unless the schema lets it be something else, which it is."""
    kinds, text = _kinds(schema), value.strip()
    if text.lower() in ("true", "false"):
        text = text.lower()  # templates write True
    if (kinds and "string" not in kinds) or (text == "null" and "null" in kinds):
        with suppress(ValueError, RecursionError):
            loaded(text)
            return text
    return json.dumps(value, ensure_ascii=False)


def _kinds(schema: Any) -> set[str]:
    """List the types that a schema and its alternatives name. Clients write schemas: they may be anything."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    others = [schema.get(key) for key in ("anyOf", "oneOf")]
    return kinds.union(*(_kinds(other) for of in others if isinstance(of, list) for other in of))


_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_BETWEEN = "<｜tool▁sep｜>"


def _deepseek(text: str, schemas: Schemas, one: Reader) -> Calls | None:
    before, *calls = text.split(_DEEPSEEK_OPEN)
    ends = [call.rstrip() for call in calls]
    if before.strip() or not all(call.endswith(_DEEPSEEK_CLOSE) for call in ends):
        return None
    return _all([call.removesuffix(_DEEPSEEK_CLOSE) for call in ends], one, schemas)


def _deepseek_v3(text: str, schemas: Schemas) -> Calls | None:
    """Read calls of the form KIND, mark, NAME, and the arguments as a block of code."""

    def one(call: str, _: Schemas) -> Calls | None:
        name, is_block, block = call.partition(_DEEPSEEK_BETWEEN)[2].partition("\n```json\n")
        arguments = block.rstrip().removesuffix("```").strip()
        return [(name.strip(), arguments)] if is_block and name.strip() and _is_object(arguments) else None

    return _deepseek(text, schemas, one)


def _deepseek_v31(text: str, schemas: Schemas) -> Calls | None:
    """Read calls of the form NAME, mark, arguments."""

    def one(call: str, _: Schemas) -> Calls | None:
        name, _between, arguments = (part.strip() for part in call.partition(_DEEPSEEK_BETWEEN))
        return [(name, arguments)] if name and _is_object(arguments) else None

    return _deepseek(text, schemas, one)


# --- the forms ----------------------------------------------------------------------------------------------

_HERMES: dict[str, Any] = {"opening": "<tool_call>", "closing": "</tool_call>"}
_DEEPSEEK: dict[str, Any] = {
    "opening": "<｜tool▁calls▁begin｜>",
    "closing": "<｜tool▁calls▁end｜>",
    "marks": (_DEEPSEEK_OPEN, _DEEPSEEK_BETWEEN, _DEEPSEEK_CLOSE),
}


def _has(*texts: str, none_of: tuple[str, ...] = ()) -> Callable[[str], bool]:
    """Judge templates by what they have and lack."""
    return lambda template: all(t in template for t in texts) and not any(t in template for t in none_of)


_LLAMA = ToolForm(
    opening="{",
    at_start=True,
    read=_objects,
    shown_by=_has('Respond in the format {"name": function name'),
)

FORMS: Mapping[str, ToolForm] = MappingProxyType(
    {
        "hermes": ToolForm(
            **_HERMES,
            read=_one,
            shown_by=_has(*_HERMES.values(), none_of=("<function=", "<arg_key>", "<parameter=")),
        ),
        "qwen3_coder": ToolForm(
            **_HERMES,
            read=_qwen3_coder,
            shown_by=_has(*_HERMES.values(), "<function=", "<parameter="),
        ),
        "llama3_json": _LLAMA,
        "llama4_json": _LLAMA,
        "mistral": ToolForm(
            opening="[TOOL_CALLS]",
            read=_mistral,
            shown_by=_has("[TOOL_CALLS]"),
            marks=("[ARGS]", "[CALL_ID]"),
        ),
        "deepseek_v3": ToolForm(
            **_DEEPSEEK, read=_deepseek_v3, shown_by=_has(_DEEPSEEK["opening"], "```json")
        ),
        "deepseek_v31": ToolForm(
            **_DEEPSEEK, read=_deepseek_v31, shown_by=_has(_DEEPSEEK["opening"], none_of=("```json",))
        ),
    }
)
"""vLLM's name of a parser -> the form that it reads. Of two that a template shows the first counts."""
