"""Say which tokens paced engines answer with: a rule that whoever judges them knows, too."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Sequence

from rayk.types.request import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class PacedTokens:
    """Tokens that depend on the prompt and their place behind it alone, so that one of another prompt, or of
    another place, is seen. None ends a request."""

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        assert len(self._eos) < vocab_size, "some token is to be left"

    @staticmethod
    def key(prompt_token_ids: Sequence[int]) -> int:
        """Return what a prompt's tokens are derived from, of 64 bits."""
        digest = hashlib.blake2b(array("q", prompt_token_ids).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def token(self, key: int, index: int) -> int:
        """Choose output token `index` of the prompt with this key."""
        mixed = (key + (index + 1) * _GOLDEN) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        token = (mixed ^ (mixed >> 31)) % self._vocab_size
        while token in self._eos:
            token = (token + 1) % self._vocab_size
        return token

    def outputs(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        """List all that is answered to a prompt."""
        key, found = self.key(prompt_token_ids), list[int]()
        for index in range(sampling.max_tokens):
            found.append(self.token(key, index))
            if found[-1] in sampling.stop_token_ids:
                break
        return found


def why_not_paced(sampling: SamplingParams) -> str:
    """Say what of a request needs logits, which paced engines have none of; "" where nothing does."""
    asked = {
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "structured_outputs": sampling.structured_outputs is not None,
        "stop": bool(sampling.stop),
    }
    return ", ".join(name for name, is_asked in asked.items() if is_asked)
