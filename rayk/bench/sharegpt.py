"""Prompts from a ShareGPT file: a JSON list of {"conversations": [{"value": text}, ...]}.

As vLLM's benchmark reads one: the first turn of a conversation is the prompt and the second one says how long
an answer is, in an order that the seed draws, without what is very short or long. Four characters count
as a token: nobody here has a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayk.types.errors import UserError
from rayk.types.files import parse_json, read_bytes

MAX_BYTES = 1 << 30  # ShareGPT_V3_unfiltered_cleaned_split.json has 672 MB
TOKEN_CHARACTERS = 4
LEAST_TOKENS = 4
MOST_PROMPT_TOKENS = 1024
MOST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ChatTurn:
    prompt: str
    num_answer_tokens: int


def read_sharegpt(path: Path, *, seed: int) -> list[ChatTurn]:
    """Read the file's turns in the order that the seed draws. Raises UserError."""
    try:
        rows = parse_json(read_bytes(path, MAX_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(problem=f"cannot read the data set: {error}", where=str(path)) from error
    turns = list(_turns(rows if isinstance(rows, list) else []))
    if not turns:
        mend = '[{"conversations": [{"value": "a question"}, {"value": "an answer"}]}, ...]'
        raise UserError(problem="no conversations of ShareGPT in the file", where=str(path), mend=mend)
    return [turns[i] for i in np.random.default_rng([seed, 7]).permutation(len(turns))]


def _turns(rows: list[Any]) -> Iterator[ChatTurn]:
    for row in rows:
        said = row.get("conversations") if isinstance(row, dict) else None
        turns = [t.get("value") for t in said[:2] if isinstance(t, dict)] if isinstance(said, list) else []
        texts = [text for text in turns if isinstance(text, str)]
        if len(texts) < 2:
            continue
        prompt_tokens, answer_tokens = (-(-len(text) // TOKEN_CHARACTERS) for text in texts)
        is_long = prompt_tokens > MOST_PROMPT_TOKENS or prompt_tokens + answer_tokens > MOST_TOKENS
        if min(prompt_tokens, answer_tokens) >= LEAST_TOKENS and not is_long:
            yield ChatTurn(texts[0], answer_tokens)
