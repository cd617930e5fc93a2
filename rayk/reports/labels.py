"""Short texts of axis values: faults, mappings and lists are JSON in cells.parquet."""

from __future__ import annotations

from typing import Any

from rayk.types.files import parse_json


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
