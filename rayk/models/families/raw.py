"""Typed look-ups in config.json whose errors name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from rayk.types.files import JSON_BYTES, parse_json, read_text

_MOST = (
    (1 << 10, ("num_hidden_layers",)),
    # Convolution widths are looped over, as are layers, heads and experts.
    (1 << 6, ("conv",)),
    (1 << 12, ("num_", "_n_", "n_group", "n_routed", "n_shared", "expand")),
    (1 << 14, ("head_dim", "d_head", "state")),
    (1 << 24, ("vocab", "position", "window", "chunk")),
)
"""Limits of numbers under keys that contain one of these parts: they decide allocations before weights can be
checked. Released models stay below two thirds of each (Llama 4 Scout has 10,485,760 positions)."""
_MOST_ELSE = 1 << 18
MAX_NUMBER = 1e300
"""Limit of real numbers: times a size it is still finite."""
MAX_LAYERS = _MOST[0][0]


def most_of(key: str) -> int:
    """Return the largest number allowed under a key of config.json."""
    return next((most for most, parts in _MOST if any(part in key for part in parts)), _MOST_ELSE)


@dataclass(frozen=True, slots=True)
class RawConfig:
    values: Mapping[str, Any]
    where: str
    """The file's name, for messages."""
    architecture: str = ""
    family: str = ""

    def of(self, values: Mapping[str, Any]) -> RawConfig:
        return replace(self, values=values)

    def of_text(self, defaults: Mapping[str, Any]) -> RawConfig:
        """Return all settings of a text model in one place: `defaults`, overridden by `text_config` of a
        larger model, overridden by the keys beside it. A null in the text model overrides its default. Raises
        CheckpointError if `text_config` is no object."""
        text = self.get("text_config", {})
        if not isinstance(text, dict):
            raise CheckpointError(f"`text_config` must be an object, not {text!r}", where=self.where)
        beside = {k: v for k, v in self.values.items() if v is not None or k not in text}
        return self.of({**defaults, **text, **beside})

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or `default` if the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Raises CheckpointError if it is absent without default, or out of
        bounds."""
        return self._integer(key, default, least=1)

    def whole(self, key: str, default: int | None = None) -> int:
        """It is `count` that allows zero."""
        return self._integer(key, default, least=0)

    def _integer(self, key: str, default: int | None, *, least: int) -> int:
        value, most = self.get(key, default), most_of(key)
        if value is None:
            raise CheckpointError(f"`{key}` is missing", where=self.where)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            kind = "a positive integer" if least else "an integer of zero or more"
            bound = f" of at most {most}" if isinstance(value, int) and value > most else ""
            raise CheckpointError(f"`{key}` must be {kind}{bound}, not {value!r}", where=self.where)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Raises CheckpointError if it is absent without default, or not one."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"`{key}` is missing", where=self.where)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MAX_NUMBER:
            raise CheckpointError(f"`{key}` must be a positive number, not {value!r}", where=self.where)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a positive number, or None if the key is absent or null."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"`{key}` must be true or false, not {value!r}", where=self.where)
        return value

    def token_id(self, key: str) -> int | None:
        """Read the first token id, or None."""
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read one id or a list of ids as a tuple; empty if absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) < 1 << 31 for i in ids):
            raise CheckpointError(f"`{key}` must be token ids, not {value!r}", where=self.where)
        return tuple(ids)

    def require(self, key: str, *known: str) -> None:
        """Raise UnsupportedArchitecture for a value that is not in `known`; the first is the default."""
        value = self.get(key, known[0])
        if value not in known:
            raise self.refuse(f"`{key}` {value!r} is not supported in this family", " or ".join(known))

    def refuse(self, problem: str, mend: str = "") -> UnsupportedArchitecture:
        """Return the error for a valid setting that is not implemented; the caller raises it."""
        return UnsupportedArchitecture(problem, where=self.where, mend=mend, architecture=self.architecture)


def read_json(path: Path, max_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file. Raises CheckpointError if it cannot be read or is no object."""
    try:
        values = parse_json(read_text(path, max_bytes))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path)) from error
    except ValueError as error:
        raise CheckpointError(
            f"not valid JSON: {error}",
            where=str(path),
            mend="download or write the checkpoint again",
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError("not a JSON object", where=str(path))
    return values
