"""Log probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Iterable

from rayk.serve.responses import ChatTokenLogprob, CompletionLogprobs, TopLogprob
from rayk.serve.text import Text, TokenText
from rayk.types.request import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Minus infinity, which JSON cannot write, becomes this, as OpenAI's does."""


def completion_logprobs(
    text: Text | None, tokens: Iterable[tuple[int, TokenLogprobs | None, int]]
) -> CompletionLogprobs:
    """`tokens`: each one's id, what is known of it (of a prompt's first: nothing), and where it begins."""
    columns: CompletionLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, known, start in tokens:
        name = _token(text, token_id).text
        columns["tokens"].append(name)
        columns["text_offset"].append(start)
        columns["token_logprobs"].append(None if known is None else _finite(known.logprob))
        columns["top_logprobs"].append(None if known is None else _top(text, name, known))
    return columns


def _top(text: Text | None, name: str, known: TokenLogprobs) -> dict[str, float]:
    """Best first; of tokens that are written alike, the likelier one. The chosen one is always there."""
    top: dict[str, float] = {}
    for token, logprob in known.top:
        top.setdefault(_token(text, token).text, _finite(logprob))
    top.setdefault(name, _finite(known.logprob))
    return top


def chat_logprobs(text: Text | None, tokens: Iterable[TokenLogprobs]) -> list[ChatTokenLogprob]:
    """Make one entry per token."""
    return [
        {
            **_entry(text, t.token_id, t.logprob),
            "top_logprobs": [_entry(text, token, logprob) for token, logprob in t.top],
        }
        for t in tokens
    ]


def _entry(text: Text | None, token_id: int, logprob: float) -> TopLogprob:
    token = _token(text, token_id)
    return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.raw)}


def _token(text: Text | None, token_id: int) -> TokenText:
    """Return the token for people; its id where there is no tokenizer."""
    return TokenText(f"token_id:{token_id}", b"") if text is None else text.token(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
