"""Read how long something may take, as people write it."""

from __future__ import annotations

import re

_UNITS_MS = {"ms": 1.0, "s": 1000.0, "us": 0.001}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")


def parse_ms(text: str) -> float | None:
    """Parse `200ms`, `1.5s` or `50us` as milliseconds; None for other texts."""
    match = _TIME.fullmatch(text)
    return None if match is None else float(match[1]) * _UNITS_MS[match[2]]
