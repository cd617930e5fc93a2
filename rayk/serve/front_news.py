"""What befalls the processes of Ray Serve, in words, from looks at which of them live. Serve itself starts
them again."""

from __future__ import annotations

from collections.abc import Mapping


class FrontNews:
    def __init__(self) -> None:
        self._known: dict[str, object] = {}
        """The process that each part had last."""
        self._lost_s: dict[str, float] = {}
        """When parts were lost that are not back yet."""

    @property
    def has_losses(self) -> bool:
        return bool(self._lost_s)

    def see(self, alive: Mapping[str, object], now: float, *, answers: bool) -> list[str]:
        """Tell what changed since the last look; the first tells nothing. `alive`: part -> the process that
        lives, None where none does. `answers`: whether clients get answers. `now`: time.monotonic."""
        lines = []
        for part, one in alive.items():
            if one != self._known.get(part, one) and part not in self._lost_s:
                self._lost_s[part] = now
                lines.append(f"{part} is lost (its process ended); Ray Serve starts it again")
            if one is not None:
                self._known[part] = one
                if part in self._lost_s and answers:
                    lines.append(f"{part} is ready again after {now - self._lost_s.pop(part):.1f} s")
        return lines
