"""Write values as texts: numbers, bytes, rates; and keep texts from steering a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rayk.types.files import parse_json


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def plural(count: int, noun: str) -> str:
    """Count a noun, e.g. `1 cell`, `1,200 cells`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def json_value(value: Any) -> Any:
    """Convert what JSON does not know, such as NumPy's values; all else becomes text."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def printable(text: str) -> str:
    """Spell out what would steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def format_value(value: Any, spec: str) -> str:
    """Format a value, empty for None and NaN; spec `MiB` takes bytes."""
    if is_null(value):
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
    if gb_per_s is None or is_null(gb_per_s):
        return ""
    return f"{gb_per_s:.2f} GB/s" if smallest >= 0.1 else f"{gb_per_s * 1000:,.1f} MB/s"


def smallest_rate(rates: Iterable[float | None]) -> float:
    """Find the smallest rate above 0; infinite without any."""
    return min((rate for rate in rates if rate is not None and rate > 0), default=math.inf)


def parsed(value: Any) -> Any:
    """Parse a JSON list or mapping of cells.parquet; any other value stays as it is."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return value


def axis_label(axis: str, value: Any) -> str:
    """Label a value, e.g. `decode.block_size 16`, `wrong_kv rope layer 1`."""
    value = parsed(value)
    if axis != "faults" or not isinstance(value, list):
        return f"{axis} {_text(value)}"
    return " + ".join(map(_fault, value)) if value else "no fault"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict | list) and not value:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)


def _fault(fault: Any) -> str:
    """Label a fault, e.g. `wrong_kv rope layer 1 (prefill rank 0)`, without its defaults."""
    if not isinstance(fault, dict):
        return str(fault)
    told = {k: v for k, v in fault.items() if v is not None and (k, v) != ("seed", 0)}
    parts = [str(told.pop(name)) for name in ("kind", "point") if name in told]
    at = [str(told.pop("role"))] if "role" in told else []
    if "rank" in told:
        at.append(f"rank {told.pop('rank')}")
    parts += [f"{name} {_text(value)}" for name, value in told.items()]
    return " ".join([*parts, f"({' '.join(at)})"] if at else parts)
