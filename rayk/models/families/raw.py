"""Reading config.json: typed look-ups whose errors name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayk.types.errors import CheckpointError, UnsupportedArchitecture
from rayk.types.files import JSON_BYTES, parse_json, read_text


class RawConfig:
    """A config.json that has been read, with the name of the file for messages."""

    def __init__(self, values: dict[str, Any], where: str, architecture: str = "") -> None:
        self.values = values
        self.where = where
        self.architecture = architecture

    def of_text(self, defaults: Mapping[str, Any]) -> RawConfig:
        """All settings of a text model in one place: its own, which a larger model has under `text_config`,
        then those that stand beside it, before `defaults`. Raises CheckpointError for another `text_config`.

        A key of the text model that is null stays so, whatever its default.
        """
        text = self.get("text_config", {})
        if not isinstance(text, dict):
            raise CheckpointError(f"`text_config` must be an object, not {text!r}", where=self.where)
        beside = {k: v for k, v in self.values.items() if v is not None or k not in text}
        return RawConfig({**defaults, **text, **beside}, self.where, self.architecture)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises CheckpointError when absent without default, or not one."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"`{key}` is missing", where=self.where)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"`{key}` must be a positive integer, not {value!r}", where=self.where)
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """An integer of zero or more. Raises CheckpointError when absent without default, or not one."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"`{key}` is missing", where=self.where)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(
                f"`{key}` must be an integer of zero or more, not {value!r}", where=self.where
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises CheckpointError when absent without default, or not one."""
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"`{key}` is missing", where=self.where)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
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
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(f"`{key}` must be token ids, not {value!r}", where=self.where)
        return tuple(ids)

    def refuse(self, problem: str, mend: str = "") -> UnsupportedArchitecture:
        """The error for a setting that is valid but not implemented; the caller raises it."""
        return UnsupportedArchitecture(problem, where=self.where, mend=mend, architecture=self.architecture)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it cannot be read or is no object."""
    try:
        values = parse_json(read_text(path, JSON_BYTES))
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
