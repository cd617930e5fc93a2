"""Draw prompts that share what hash ids say they share."""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rayk.traces.record import Recorded, scaled

MAX_KEPT_TOKENS = 1 << 22  # of blocks that may be asked for again: 32 MiB


class TracePrompts:
    """Draws token ids between the two of `token_ids`, both included, by a seed.

    `block_tokens`: what 512 tokens of the trace become. One seed draws the same for a load and a simulation.
    """

    def __init__(self, *, block_tokens: int, token_ids: tuple[int, int], seed: int) -> None:
        self._block_tokens = block_tokens
        self._low, self._high = token_ids
        self._seed = seed
        self._block = lru_cache(maxsize=max(1, MAX_KEPT_TOKENS // block_tokens))(self._draw_block)

    def tokens(self, row: Recorded, index: int) -> list[int]:
        """Draw the prompt of request `index`: block by block the tokens of its hash id, then its own.

        A session without hash ids has a text of its own, and each turn's prompt is a start of that: as in a
        conversation, a prompt begins with the one before.
        """
        count = scaled(row.num_prompt_tokens, self._block_tokens)
        tokens: list[int] = []
        for hash_id in row.hash_ids:
            tokens += self._block(hash_id).tolist()
        own = max(0, count - len(tokens))
        if row.session is not None and not row.hash_ids:
            tokens += self._draw([4, zlib.crc32(row.session.encode())], own).tolist()
        else:
            tokens += self._draw([3, index], own).tolist()
        return tokens[:count]

    def _draw_block(self, hash_id: int) -> NDArray[np.int64]:
        return self._draw([2, hash_id], self._block_tokens)

    def _draw(self, stream: list[int], count: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, *stream]).integers(self._low, self._high + 1, count)
