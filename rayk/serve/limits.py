"""A front's limits, and how people set them. Free of everything heavy: `rayk serve` reads them first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from rayk.types.errors import UserError

_MEGABYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """A front's own limits."""

    api_key: str | None = field(default=None, repr=False)
    """Asked for on every path but /health: `Authorization: Bearer KEY`."""
    max_head_bytes: int = 64 * 1024
    """Of a request's first line and headers. Of --http uvicorn."""
    head_s: float = 30.0
    """A connection that waits for nothing must send a head in so long, and whole. Of --http uvicorn."""
    max_body_bytes: int = 8 * _MEGABYTE
    body_s: float = 30.0
    """A body must be here so long after its head."""
    unread_s: float = 120.0
    """A client that takes nothing for so long of what waits for it is cut, and its requests end. Kernels take
    up to 64 KiB at once for a slow one. Of --http uvicorn; Ray Serve's proxy has unread.UNREAD_S."""
    max_prompt_tokens: int | None = None
    """None: what the model's positions leave room for."""
    max_n: int = 128
    """Choices of one prompt."""
    max_choices: int = 256
    """Of one call: prompts times n."""
    max_stop: int = 16
    """Stop strings of one call, and stop token ids. (OpenAI: 4 strings.)"""
    max_stop_characters: int = 256
    """Of one stop string."""
    ignores_unknown: bool = False
    """Whether fields that nobody knows are ignored; else they are refused, as OpenAI does."""


LIMITS = tuple(f.name for f in fields(HttpSettings) if f.name != "api_key")
"""What people may set by name."""
OF_UVICORN = frozenset({"max_head_bytes", "head_s", "unread_s"})
"""Those that Ray Serve's proxy, which keeps connections itself, knows nothing of."""
_NUMBERS = {"body_s": float, "head_s": float, "unread_s": float}
"""Limits that are no whole numbers."""


def http_settings(api_key: str | None, limits: Sequence[str]) -> HttpSettings:
    """`limits`: KEY=VALUE texts. Raises UserError."""
    given: dict[str, object] = {}
    for text in limits:
        name, _, value = text.partition("=")
        if name not in LIMITS:
            raise UserError(
                f"no such limit: {name}", where=f"--limit {text}", mend=f"one of {', '.join(LIMITS)}"
            )
        given[name] = _is_true(text, value) if name == "ignores_unknown" else _number(text, name, value)
    return HttpSettings(api_key=api_key, **given)  # type: ignore[arg-type]


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
