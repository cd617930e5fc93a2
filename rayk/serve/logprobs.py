"""Log probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayk.serve.text import Text, TokenText
from rayk.types.request import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""What minus infinity is in JSON, as OpenAI says it."""


class Columns:
    """Tokens with their log probabilities, in the form of OpenAI's completions."""

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self.values: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add(self, token_id: int, told: TokenLogprobs | None, start: int) -> None:
        """One token; None of the first of a prompt, which nothing comes before."""
        name = _token(self._text, token_id).text
        self.values["tokens"].append(name)
        self.values["text_offset"].append(start)
        self.values["token_logprobs"].append(None if told is None else _finite(told.logprob))
        if told is None:
            self.values["top_logprobs"].append(None)
            return
        # Best first; of tokens that are written alike, the likelier one. The chosen one is always there.
        top: dict[str, float] = {}
        for token, logprob in told.top:
            top.setdefault(_token(self._text, token).text, _finite(logprob))
        top.setdefault(name, _finite(told.logprob))
        self.values["top_logprobs"].append(top)


def chat_content(text: Text | None, told: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """Tokens in the form of chat completions."""
    return [
        {
            **_entry(text, t.token_id, t.logprob),
            "top_logprobs": [_entry(text, token, logprob) for token, logprob in t.top],
        }
        for t in told
    ]


def _entry(text: Text | None, token_id: int, logprob: float) -> dict[str, Any]:
    token = _token(text, token_id)
    return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.raw)}


def _token(text: Text | None, token_id: int) -> TokenText:
    """For people; its id where there is no tokenizer."""
    return TokenText(f"token_id:{token_id}", b"") if text is None else text.token(token_id)


def _finite(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, LEAST_LOGPROB)
