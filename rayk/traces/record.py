"""A recorded request, whatever file it comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

from rayk.types.bounds import MAX_TOKENS
from rayk.types.errors import UserError

BLOCK_TOKENS = 512  # prompt tokens that a hash id stands for


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One request of a trace. Outside a session it is due at `at_ns`; in a session, see replay.py."""

    # since the trace began; None: as soon as the session's last answer and the delay allow
    at_ns: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()  # of blocks of BLOCK_TOKENS prompt tokens, from the prompt's start
    session: str | None = None  # whose turns go one after another
    delay_ns: int = 0  # from the end of the session's last answer to this turn


def hastened(row: Recorded, speed: float) -> Recorded:
    """Return a request that comes, and waits, at `speed` times the pace it was recorded at."""
    at_ns = None if row.at_ns is None else round(row.at_ns / speed)
    return replace(row, at_ns=at_ns, delay_ns=round(row.delay_ns / speed))


def scaled(num_tokens: int, block_tokens: int) -> int:
    """Scale tokens of a trace to tokens to send, at least 1."""
    return max(1, -(-num_tokens * block_tokens // BLOCK_TOKENS))


def token_count(name: str, value: object, where: str) -> int:
    """Return a number of tokens. Raises UserError, where it is none."""
    if is_whole(value) and 0 < value <= MAX_TOKENS:
        return value
    raise UserError(
        problem=f"{name} {value!r} is no number of tokens",
        where=where,
        mend=f"a whole number, at least 1, at most {MAX_TOKENS}, or leave the line out",
    )


def is_whole(value: object) -> TypeGuard[int]:
    """Tell whether a value from JSON is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)
