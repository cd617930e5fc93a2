"""A front's limits, and how people set them. Free of everything heavy: `rayk serve` reads them first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from rayk.serve.tool_forms import AUTO, check_parser
from rayk.types.errors import UserError

_MEGABYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """What a front lets clients do."""

    api_key: str | None = field(default=None, repr=False)
    """Every path but /health asks for it: `Authorization: Bearer KEY`."""
    max_head_bytes: int = 64 * 1024
    """Bounds a request's first line and headers. Only --http uvicorn has it."""
    head_s: float = 30.0
    """An idle connection must send a whole head within this. Only --http uvicorn has it."""
    max_body_bytes: int = 8 * _MEGABYTE
    body_s: float = 30.0
    """A body must arrive within this after its head."""
    unread_s: float = 120.0
    """A client that reads nothing of its answer for so long is cut, and its requests end. (Kernels take up to
    64 KiB at once for a slow one.) Only --http uvicorn has it; Ray Serve's proxy has unread.UNREAD_S."""
    max_prompt_tokens: int | None = None
    """None: the model's positions alone bound prompts."""
    max_n: int = 128
    """Bounds the choices of one prompt."""
    max_choices: int = 256
    """Bounds the choices of one call: prompts times n."""
    max_stop: int = 16
    """Bounds the stop strings of one call, and its stop token ids. (OpenAI takes 4 strings.)"""
    max_stop_characters: int = 256
    """Bounds one stop string."""
    tool_call_parser: str = AUTO
    """How the model writes the calls that it chooses to make: a name of tool_forms.FORMS."""
    ignores_unknown: bool = False
    """Whether unknown fields are ignored; OpenAI refuses them."""


LIMITS = tuple(f.name for f in fields(HttpSettings) if f.name not in ("api_key", "tool_call_parser"))
"""Names that users may set."""
OF_UVICORN = frozenset({"max_head_bytes", "head_s", "unread_s"})
"""Limits that Ray Serve's proxy, which keeps connections itself, does not have."""
_NUMBERS = {"body_s": float, "head_s": float, "unread_s": float}
"""Limits that need not be whole numbers."""


def http_settings(api_key: str | None, limits: Sequence[str], tool_call_parser: str = AUTO) -> HttpSettings:
    """Parse KEY=VALUE texts. Raises UserError."""
    given: dict[str, object] = {}
    for text in limits:
        name, _, value = text.partition("=")
        if name not in LIMITS:
            raise UserError(
                f"no such limit: {name}", where=f"--limit {text}", mend=f"one of {', '.join(LIMITS)}"
            )
        given[name] = _is_true(text, value) if name == "ignores_unknown" else _number(text, name, value)
    parser = check_parser(tool_call_parser)
    return HttpSettings(api_key=api_key, tool_call_parser=parser, **given)  # type: ignore[arg-type]


def _is_true(text: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise UserError("neither true nor false", where=f"--limit {text}")
    return value == "true"


def _number(text: str, name: str, value: str) -> float:
    try:
        number = _NUMBERS.get(name, int)(value)
    except ValueError:
        number = 0
    if not number > 0 or not math.isfinite(number):
        raise UserError("not a number above 0", where=f"--limit {text}")
    return number
