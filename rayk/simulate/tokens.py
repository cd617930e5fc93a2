"""Choose the tokens of simulated requests: any that go on, and the one that ends an output where it ends."""

from __future__ import annotations

from zlib import crc32

from rayk.models.config import DecoderConfig


class TokenRule:
    """Tells a request's n-th output token. Outputs of two requests differ, so that a prefix cache finds no
    more of them than it would of real ones."""

    def __init__(self, config: DecoderConfig) -> None:
        self.end = min(config.eos_token_ids, default=config.vocab_size - 1)
        """The only token that ends an output before its limit."""
        self._size = config.vocab_size
        self._lengths: dict[str, int] = {}

    def begin(self, request_id: str, num_output_tokens: int) -> None:
        """A request's output ends with so many tokens; without this, at its limit."""
        self._lengths[request_id] = num_output_tokens

    def forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)

    def token(self, request_id: str, number: int) -> int:
        """Choose the output token of this number, from 1. Attempts of one request get the same ones."""
        request_id = request_id.partition("~")[0]
        if number == self._lengths.get(request_id):
            return self.end
        token = (crc32(request_id.encode()) + 7919 * number) % (self._size - 1)
        return token + (token >= self.end)
