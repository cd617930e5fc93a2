"""Recorded arrivals of Azure: CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

The traces of 2023 (Splitwise, ISCA 2024) have times such as `2023-11-16 18:15:46.6805900`, those of 2024
(DynamoLLM, HPCA 2025) `2024-05-10 00:00:00.009930+00:00`, without a fraction where that is 0. Times count
from the first row. Nothing says what prompts share. (Azure/AzurePublicDataset.)
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from rayk.traces.record import Recorded, token_count
from rayk.types.errors import UserError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_TIME = re.compile(r"(\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?(?:Z|[+-]00:?00)?", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_NS_PER_S = 1_000_000_000


class AzureLines:
    """Parses lines; the first is the header."""

    def __init__(self) -> None:
        self._has_header = False
        self._begin_ns: int | None = None

    def parse(self, line: str, where: str) -> Recorded | None:
        """Parse one line; None for the header. Raises UserError with `where`."""
        if not self._has_header:
            if line.strip() != HEADER:
                raise UserError(problem=f"the header is {line[:80]!r}", where=where, mend=HEADER)
            self._has_header = True
            return None
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 3:
            problem = f"{len(cells)} columns, and the header has 3"
            raise UserError(problem=problem, where=where, mend=f"a row of {HEADER}")
        time_ns = _time_ns(cells[0], where)
        if self._begin_ns is None:
            self._begin_ns = time_ns
        return Recorded(
            at_ns=time_ns - self._begin_ns,
            num_prompt_tokens=_count("ContextTokens", cells[1], where),
            num_output_tokens=_count("GeneratedTokens", cells[2], where),
        )


def _time_ns(text: str, where: str) -> int:
    """Return ns since 1970. Times without an offset are taken as UTC."""
    match = _TIME.fullmatch(text)
    try:
        second = datetime.fromisoformat(match[1]).replace(tzinfo=UTC) if match else None
    except ValueError:
        second = None
    if match is None or second is None:
        mend = "2023-11-16 18:15:46.6805900, or 2024-05-10 00:00:00.009930+00:00"
        raise UserError(problem=f"TIMESTAMP {text!r} is no time", where=where, mend=mend)
    return round(second.timestamp()) * _NS_PER_S + int((match[2] or "").ljust(9, "0"))


def _count(name: str, text: str, where: str) -> int:
    return token_count(name, int(text) if _COUNT.fullmatch(text) else text, where)
