"""Recorded arrivals in Mooncake's format: JSON lines of timestamp, input_length, output_length, hash_ids.

`timestamp` is in milliseconds since the trace began. A hash id stands for a block of 512 prompt tokens and
all before it, so that prompts which begin with the same ids begin with the same tokens; the last block may be
partial, and prompts may have tokens after their last id, which are their own. (Mooncake, FAST 2025; the
traces are in kvcache-ai/Mooncake, FAST25-release/traces.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from rayk.types.bounds import MAX_TOKENS
from rayk.types.errors import UserError
from rayk.types.files import PROMPTS_BYTES, parse_json, read_text

BLOCK_TOKENS = 512
NS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    at_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, *, limit: int | None = None) -> list[Recorded]:
    """Read the first `limit` requests in order of their time. Raises UserError that names file and line."""
    try:
        lines = read_text(path, PROMPTS_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(problem=f"cannot read the trace: {error}", where=str(path)) from error
    rows = [_read(line, f"{path}:{n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise UserError(problem="the trace is empty", where=str(path))
    return sorted(rows, key=lambda row: row.at_ns)[:limit]


def _read(line: str, where: str) -> Recorded:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(problem=f"not JSON: {error}", where=where) from error
    if not isinstance(row, dict):
        raise UserError(problem="not an object", where=where)
    num_prompt_tokens = _whole(row, "input_length", where)
    hash_ids = row.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(_is_whole(v) and v >= 0 for v in hash_ids):
        raise UserError(problem=f"hash_ids {hash_ids!r} are no whole numbers", where=where)
    most = -(-num_prompt_tokens // BLOCK_TOKENS)
    if len(hash_ids) > most:
        raise UserError(
            problem=f"{len(hash_ids)} hash_ids for {num_prompt_tokens} tokens: at most {most} blocks of "
            f"{BLOCK_TOKENS}",
            where=where,
        )
    timestamp = row.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e12:
        raise UserError(problem=f"timestamp {timestamp!r} is no time in milliseconds", where=where)
    return Recorded(
        at_ns=round(timestamp * NS_PER_MS),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=_whole(row, "output_length", where),
        hash_ids=tuple(hash_ids),
    )


def _whole(row: dict[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if not _is_whole(value) or not 0 < value <= MAX_TOKENS:
        mend = f"at least 1, at most {MAX_TOKENS}"
        raise UserError(problem=f"{name} {value!r} is no number of tokens", where=where, mend=mend)
    return value


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def prompt_tokens(
    row: Recorded, *, index: int, block_tokens: int, token_ids: tuple[int, int], seed: int
) -> list[int]:
    """Draw a prompt: block by block the tokens of its hash id, then the request's own, drawn with `index`.
    512 tokens of the trace become `block_tokens`."""
    count = scaled(row.num_prompt_tokens, block_tokens)
    low, high = token_ids
    tokens: list[int] = []
    for hash_id in row.hash_ids:
        draw = np.random.default_rng([seed, 2, hash_id])
        tokens += draw.integers(low, high + 1, block_tokens).tolist()
    own = max(0, count - len(tokens))
    tokens += np.random.default_rng([seed, 3, index]).integers(low, high + 1, own).tolist()
    return tokens[:count]


def scaled(num_tokens: int, block_tokens: int) -> int:
    """Scale tokens of a trace to tokens to send, at least 1."""
    return max(1, -(-num_tokens * block_tokens // BLOCK_TOKENS))
