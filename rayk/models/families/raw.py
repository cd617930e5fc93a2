"""Reading config.json: typed look-ups whose errors name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from rayk.types.files import JSON_BYTES, parse_json, read_text

_MOST = (
    (1 << 10, ("num_hidden_layers",)),
    # Positions of a state's convolution are gone through one by one, as layers, heads and experts are.
    (1 << 6, ("conv",)),
    (1 << 12, ("num_", "_n_", "n_group", "n_routed", "n_shared", "expand")),
    (1 << 14, ("head_dim", "d_head", "state")),
    (1 << 24, ("vocab", "position", "window", "chunk")),
)
"""What numbers under keys with one of these parts may be: much is allocated by them before there is a header
to hold them against. No released model known is above two thirds of any (Llama 4 Scout has 10,485,760
positions)."""
_MOST_ELSE = 1 << 18
MAX_NUMBER = 1e300
"""Of any real number: times a size it is still one."""
MAX_LAYERS = _MOST[0][0]


def most_of(key: str) -> int:
    """What the number under a key of config.json may be at most."""
    return next((most for most, parts in _MOST if any(part in key for part in parts)), _MOST_ELSE)


@dataclass(frozen=True, slots=True)
class RawConfig:
    """A config.json that has been read."""

    values: Mapping[str, Any]
    where: str
    """The file's name, for messages."""
    architecture: str = ""
    family: str = ""

    def of(self, values: Mapping[str, Any]) -> RawConfig:
        """Other values of the same model."""
        return replace(self, values=values)

    def of_text(self, defaults: Mapping[str, Any]) -> RawConfig:
        """All settings of a text model in one place: its own, which a larger model has under `text_config`,
        then those that stand beside it, before `defaults`. Raises CheckpointError for another `text_config`.

        A key of the text model that is null stays so, whatever its default.
        """
        text = self.get("text_config", {})
        if not isinstance(text, dict):
            raise CheckpointError(f"`text_config` must be an object, not {text!r}", where=self.where)
        beside = {k: v for k, v in self.values.items() if v is not None or k not in text}
        return self.of({**defaults, **text, **beside})

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer that a model may have. Raises CheckpointError when absent without default, or
        none."""
        return self._integer(key, default, least=1)

    def whole(self, key: str, default: int | None = None) -> int:
        """As `count`, or zero."""
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
        """A positive number. Raises CheckpointError when absent without default, or not one."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"`{key}` is missing", where=self.where)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MAX_NUMBER:
            raise CheckpointError(f"`{key}` must be a positive number, not {value!r}", where=self.where)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None where the key is absent or null."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false. Raises CheckpointError when it is something else."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"`{key}` must be true or false, not {value!r}", where=self.where)
        return value

    def token_id(self, key: str) -> int | None:
        """A token id or None. Raises CheckpointError when it is something else."""
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids as a tuple; empty when absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) < 1 << 31 for i in ids):
            raise CheckpointError(f"`{key}` must be token ids, not {value!r}", where=self.where)
        return tuple(ids)

    def require(self, key: str, *known: str) -> None:
        """Raise UnsupportedArchitecture for a value that is none of `known`; the first stands for none."""
        value = self.get(key, known[0])
        if value not in known:
            raise self.refuse(f"`{key}` {value!r} is not supported in this family", " or ".join(known))

    def refuse(self, problem: str, mend: str = "") -> UnsupportedArchitecture:
        """The error for a setting that is valid but not implemented; the caller raises it."""
        return UnsupportedArchitecture(problem, where=self.where, mend=mend, architecture=self.architecture)


def read_json(path: Path, max_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it cannot be read or is no object."""
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
