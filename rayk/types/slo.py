"""Say when an answer is good: limits of its times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayk.types.durations import parse_ms
from rayk.types.errors import UserError

METRICS = ("ttft", "tpot", "itl", "e2e")  # TTFT, TPOT, ITL and E2E, as columns begin with them


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Limits in milliseconds that a good answer keeps."""

    # by ttft, tpot, e2e, or `itl`, which limits every gap
    limits_ms: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(f"{name}={limit:g}ms" for name, limit in self.limits_ms.items())

    def is_kept(self, times: Mapping[str, Any]) -> bool:
        """Tell whether an answer keeps every limit. `times` has `num_output_tokens` and, of each limit, a
        column such as `ttft_ms`. An unknown time breaks its limit, but an answer of one token has no TPOT,
        and one of one chunk no gaps."""
        for name, limit_ms in self.limits_ms.items():
            value = times[f"{name}_ms"]
            if (name == "tpot" and times["num_output_tokens"] == 1) or (name == "itl" and value == []):
                continue
            worst = max(value, default=None) if isinstance(value, list) else value
            if worst is None or not worst <= limit_ms:
                return False
        return True


def parse_slo(text: str, *, where: str = "--slo") -> Slo:
    """Parse `ttft=200ms,tpot=20ms`. Raises UserError."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        limit_ms = parse_ms(value)
        if name not in METRICS or limit_ms is None or name in limits:
            known = ", ".join(METRICS)
            raise UserError(
                problem=f"not an objective: {part!r}",
                where=where,
                mend=f"each of {known} once, with a time in us, ms or s: ttft=200ms,tpot=20ms",
            )
        limits[name] = limit_ms
    return Slo(limits_ms=limits)
