"""Read dataclasses and named tuples from JSON, and write them: unknown keys and wrong types are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rayk.types.errors import UserError

T = TypeVar("T")


def as_json(value: Any) -> dict[str, Any]:
    """Return what `read` makes the same dataclass of."""
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init}


def read(kind: type[T], values: Any, where: str) -> T:
    """Make a `kind`, a dataclass or named tuple, of parsed JSON. Raises UserError naming the place."""
    if not isinstance(values, Mapping):
        raise UserError(f"expected a mapping, found {type(values).__name__}", where=where)
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        hints = {f.name: hints[f.name] for f in fields(kind) if f.init}
    if unknown := sorted(set(values) - set(hints)):
        raise UserError(f"unknown key {unknown[0]}", where=where, mend=f"keys: {', '.join(sorted(hints))}")
    if missing := sorted(_needed(kind, hints) - set(values)):
        raise UserError(f"key {missing[0]} is missing", where=where)
    return kind(**{name: _value(hints[name], item, f"{where}: {name}") for name, item in values.items()})


def _needed(kind: Any, hints: Mapping[str, Any]) -> set[str]:
    if not is_dataclass(kind):
        return set(hints) - set(getattr(kind, "_field_defaults", {}))
    return {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        (kind,) = (part for part in parts if part is not NoneType)
        return None if value is None else _value(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list) or (parts[-1] is not Ellipsis and len(value) != len(parts)):
            raise UserError(
                "expected a list" if parts[-1] is Ellipsis else f"expected {len(parts)} values", where
            )
        kinds = (parts[0],) * len(value) if parts[-1] is Ellipsis else parts
        return tuple(
            _value(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise UserError("expected a mapping", where)
        return {name: _value(parts[1], item, f"{where}.{name}") for name, item in value.items()}
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return read(hint, value, where)
    allowed = (int, float) if hint is float else hint
    if not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"expected {hint.__name__}, found {value!r}", where)
    return value


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return as_json(value)
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
