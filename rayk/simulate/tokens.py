"""Choose the tokens of simulated requests: any that go on, and the one that ends an output where it ends."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from zlib import crc32

from rayk.models.config import DecoderConfig


class TokenRule:
    """Tells a request's n-th output token. Outputs of two requests differ where those of real ones would, so
    that a prefix cache keeps and finds as much of them."""

    def __init__(self, config: DecoderConfig) -> None:
        self.end = min(config.eos_token_ids, default=config.vocab_size - 1)
        """The only token that ends an output before its limit."""
        self._cycle = [t for t in range(config.vocab_size) if t != self.end]
        """The tokens of every output, which begins somewhere in it."""
        self._lengths: dict[str, int] = {}
        self._starts: dict[str, int] = {}

    def begin(
        self, request_id: str, *, prompt: Sequence[int] | None = None, num_output_tokens: int | None = None
    ) -> None:
        """A request comes, whose output ends with so many tokens; None: at its limit. `prompt`: requests of
        one prompt get the same tokens, as of a model that draws none."""
        if prompt is not None:
            self._starts[request_id] = crc32(array("q", prompt))
        if num_output_tokens is not None:
            self._lengths[request_id] = num_output_tokens

    def forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)
        self._starts.pop(request_id, None)

    def num_left(self, request_id: str, num_told: int) -> int:
        """Count the output tokens after the first `num_told` up to the one that ends it, as far as known."""
        num_tokens = self._lengths.get(request_id.partition("~")[0])
        return sys.maxsize if num_tokens is None else num_tokens - num_told

    def token(self, request_id: str, number: int) -> int:
        """Choose the output token of this number, from 1. Attempts of one request get the same ones."""
        (token,) = self.tokens(request_id, number, 1)
        return token

    def tokens(self, request_id: str, number: int, count: int) -> list[int]:
        """Choose the tokens of this number and those after it."""
        request_id = request_id.partition("~")[0]
        cycle = self._cycle
        first = self._starts.get(request_id)
        start = ((crc32(request_id.encode()) if first is None else first) + number) % len(cycle)
        found = cycle[start : start + count]
        while len(found) < count:
            found += cycle[: count - len(found)]
        if (end := self._lengths.get(request_id, 0) - number) >= 0 and end < count:
            found[end] = self.end
        return found
