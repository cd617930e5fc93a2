"""Recorded arrivals as JSON lines of timestamp, input_length, output_length, hash_ids.

`timestamp` is in milliseconds since the trace began. A hash id stands for a block of 512 prompt tokens and
all before it, so that prompts which begin with the same ids begin with the same tokens; the last block may be
partial, and prompts may have tokens after their last id, which are their own. (Mooncake, FAST 2025; the
traces are in kvcache-ai/Mooncake, FAST25-release/traces.)

Agents' traces have `session_id` and `delay` besides, as NVIDIA's AIPerf reads them: lines of a session are
its turns, in order, and `delay` is in milliseconds from the end of the answer before. `input_length` is of
the whole prompt, what the session said before included.
"""

from __future__ import annotations

from typing import Any

from rayk.traces.record import BLOCK_TOKENS, Recorded, is_whole, token_count
from rayk.types.errors import UserError
from rayk.types.files import parse_json

NS_PER_MS = 1e6
_MAX_MS = 1e12
_TIMES = f"milliseconds, at least 0, below {_MAX_MS:g}"
_TEXTS = ("messages", "payload", "text_input")  # what AIPerf sends as it is


class MooncakeLines:
    """Parses lines, of which none belongs to a session."""

    def parse(self, line: str, where: str) -> Recorded:
        """Parse one line. Raises UserError with `where`."""
        row = _object(line, where)
        for name in ("session_id", "delay"):
            if row.get(name) is not None:
                raise UserError(
                    problem=f"{name} in a trace without sessions",
                    where=where,
                    mend="format agentic sends a session's turns one after another",
                )
        return _recorded(row, where, at_ns=_time_ns(row, "timestamp", where))


class AgenticLines:
    """Parses lines, some or all of which belong to sessions."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def parse(self, line: str, where: str) -> Recorded:
        """Parse one line. Raises UserError with `where`.

        A session's first turn has a timestamp. A later one with a delay goes by that alone: when it came
        depended on how fast the answers came to whoever recorded it.
        """
        row = _object(line, where)
        session = row.get("session_id")
        if session is None:
            return MooncakeLines().parse(line, where)
        if not isinstance(session, str) or not session:
            raise UserError(
                problem=f"session_id {session!r} is no name", where=where, mend='a text: "session_id": "a"'
            )
        follows = session in self._begun
        self._begun.add(session)
        delay_ns = _time_ns(row, "delay", where) if row.get("delay") is not None else None
        if not follows:
            # A delay of the first turn has nothing to count from.
            return _recorded(row, where, at_ns=_time_ns(row, "timestamp", where), session=session)
        has_time = delay_ns is None and row.get("timestamp") is not None
        at_ns = _time_ns(row, "timestamp", where) if has_time else None
        return _recorded(row, where, at_ns=at_ns, session=session, delay_ns=delay_ns or 0)


def _object(line: str, where: str) -> dict[str, Any]:
    mend = '{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}'
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(problem=f"not JSON: {error}", where=where, mend=mend) from error
    if not isinstance(row, dict):
        raise UserError(problem="not an object", where=where, mend=mend)
    return row


def _recorded(
    row: dict[str, Any], where: str, *, at_ns: int | None, session: str | None = None, delay_ns: int = 0
) -> Recorded:
    texts = [name for name in _TEXTS if row.get(name) is not None]
    if texts:
        problem = f"{texts[0]}: traces have lengths, and no texts"
        raise UserError(problem=problem, where=where, mend="input_length; texts are for --prompts FILE")
    num_prompt_tokens = token_count("input_length", row.get("input_length"), where)
    hash_ids = row.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(is_whole(v) and v >= 0 for v in hash_ids):
        raise UserError(
            problem=f"hash_ids {hash_ids!r} are no whole numbers",
            where=where,
            mend="a list such as [0, 7, 9]",
        )
    most = -(-num_prompt_tokens // BLOCK_TOKENS)
    if len(hash_ids) > most:
        raise UserError(
            problem=f"{len(hash_ids)} hash_ids for {num_prompt_tokens} tokens: at most {most} blocks of "
            f"{BLOCK_TOKENS}",
            where=where,
            mend=f"one hash id for each {BLOCK_TOKENS} tokens of the prompt",
        )
    return Recorded(
        at_ns=at_ns,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=token_count("output_length", row.get("output_length"), where),
        hash_ids=tuple(hash_ids),
        session=session,
        delay_ns=delay_ns,
    )


def _time_ns(row: dict[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_MS:
        raise UserError(problem=f"{name} {value!r} is no time in milliseconds", where=where, mend=_TIMES)
    return round(value * NS_PER_MS)
