"""Say what form an output must have: what a client asks for, before anything reads it."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_STRUCTURE_CHARACTERS = 1 << 17
"""The longest schema, expression or grammar that is looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """Asks for an output of a certain form: exactly one of its fields says which. The names are vLLM's.

    Every token is then chosen among those with which the text can still get that form. The output ends with
    finish reason `stop` once it has it: where nothing can follow, at once and without an EOS; else where the
    model chooses an EOS, also under `ignore_eos`. One that `max_tokens` or a stop string cuts short is the
    beginning of such a text.
    """

    json: str | None = None
    """A JSON schema, as JSON text: the output is a JSON value that fits it."""
    json_object: bool = False  # any JSON object
    regex: str | None = None  # the whole output matches it; Rust's syntax, without look-around
    choice: tuple[str, ...] = ()  # the output is one of these texts
    grammar: str | None = None  # a context-free grammar, of Lark's or GBNF's (llama.cpp's) syntax
    disable_any_whitespace: bool = False  # JSON is written without white space between its tokens

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StructuredOutputs:
        """Take these fields as people write them: a schema also as what its text means, choices as a list.
        Raises ValueError for another field, a value of another type, and what does not ask for one thing."""
        values = {name: value for name, value in given.items() if value is not None}
        for name, value in values.items():
            if name not in TYPES:
                raise ValueError(f"{name!r} is none of {', '.join(TYPES)}")
            if not isinstance(value, TYPES[name]):
                kinds = " or ".join(kind.__name__ for kind in TYPES[name])
                raise ValueError(f"{name}: {value!r} is no {kinds}")  # noqa: TRY004 - a file's fault
        if "json" in values:
            values["json"] = schema_text(values["json"])
        if "choice" in values:
            if not all(isinstance(text, str) for text in values["choice"]):
                raise ValueError("choice: every one is a text")
            values["choice"] = tuple(values["choice"])
        made = cls(**values)
        if len(made.kinds) != 1:
            raise ValueError(f"it asks for {' and '.join(made.kinds) or 'nothing'}, not for one thing")
        return made

    @property
    def kinds(self) -> tuple[str, ...]:
        """Name the fields that ask for something."""
        asked = {
            "json": self.json is not None,
            "json_object": self.json_object is True,
            "regex": self.regex is not None,
            "choice": bool(self.choice),
            "grammar": self.grammar is not None,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    @property
    def num_characters(self) -> int:
        """Count the characters of the description."""
        texts = (self.json, self.regex, self.grammar, *self.choice)
        return sum(len(text) for text in texts if text is not None)


TYPES: Mapping[str, tuple[type, ...]] = {
    "json": (dict, str, bool),
    "json_object": (bool,),
    "regex": (str,),
    "choice": (list, tuple),
    "grammar": (str,),
    "disable_any_whitespace": (bool,),
}
"""Field -> what people write there."""


def schema_text(schema: Mapping[str, Any] | bool | str) -> str:
    """Write a schema as engines are told it; one that is text already stays as it is."""
    return schema if isinstance(schema, str) else json_text.dumps(schema, separators=(",", ":"))
