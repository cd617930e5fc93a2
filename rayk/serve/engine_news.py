"""What befalls engines, in words, from looks at their health."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class EngineNews:
    """Turns looks at one fleet into lines. What begins and ends between two looks is told by its end
    alone."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._reported: dict[str, str] = {}
        """Engines that are not ready -> the trouble that was reported."""

    def see(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Tell what changed since the last look; the first tells nothing. `rows`: the engines of
        types.serving.Health."""
        return [line for row in rows for line in self._see(row)]

    def _see(self, row: Mapping[str, Any]) -> list[str]:
        name, epoch = row["name"], row["epoch"]
        before = self._epochs.setdefault(name, epoch)
        if row["state"] != "ready":
            is_new = name not in self._reported or (row["trouble"] and row["trouble"] != self._reported[name])
            self._reported[name] = row["trouble"] or self._reported.get(name, "")
            why = f" ({row['trouble']})" if row["trouble"] else ""
            return [f"{name} is lost{why}; forming it again"] if is_new else []
        was_reported = self._reported.pop(name, None) is not None
        self._epochs[name] = epoch
        if not was_reported and epoch == before:
            return []
        return [f"{name} is ready again{_how(row['restart'])}"]


def _how(restart: Mapping[str, Any]) -> str:
    parts = []
    if "total_s" in restart:
        parts.append(f"after {restart['total_s']:.1f} s")
    if number := restart.get("num_replaced"):
        parts.append(f"with {number} new worker{'s' if number > 1 else ''}")
    return "".join(f" {part}" for part in parts)
