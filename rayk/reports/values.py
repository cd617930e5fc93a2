"""Write values as texts: numbers, bytes, rates; and keep texts from steering a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def printable(text: str) -> str:
    """Spell out what would steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def format_value(value: Any, spec: str) -> str:
    """Format a value, empty for None and NaN; spec `MiB` takes bytes."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, str):
        return printable(value)
    if spec == "MiB":
        return f"{value / 2**20:,.3g}" if value < 2**30 else f"{value / 2**20:,.0f}"
    if spec.endswith("d"):
        value = int(value)
    return format(value, spec)


def format_bytes(count: float) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if value == int(value) else f"{value:,.1f} {unit}"


def format_rate(gb_per_s: float | None, smallest: float) -> str:
    """Format 10^9 bytes per second in the unit that the smallest of neighbouring rates asks for; empty where
    nothing moved."""
    if gb_per_s is None or gb_per_s != gb_per_s:
        return ""
    return f"{gb_per_s:.2f} GB/s" if smallest >= 0.1 else f"{gb_per_s * 1000:,.1f} MB/s"


def smallest_rate(rates: Iterable[float | None]) -> float:
    """Find the smallest rate above 0; infinite without any."""
    return min((rate for rate in rates if rate is not None and rate > 0), default=math.inf)
