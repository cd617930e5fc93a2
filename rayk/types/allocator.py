"""What the scheduler asks of whoever owns the KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

BlockUpdates = tuple[tuple[int, tuple[int, ...]], ...]
"""Per KV group: (first index of the block table that changes, the ids from there on)."""


class BlockAllocator(Protocol):
    """Block tables of running requests, over all KV groups at once."""

    def extend(self, request_id: str, num_tokens: int) -> BlockUpdates | None:
        """Make the request's tables hold `num_tokens` tokens. None (nothing changed) if blocks are short."""

    def match(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> int:
        """Give a request that has no blocks those of its longest cached prefix of up to `max_tokens` tokens;
        how many tokens that is."""

    def unmatch(self, request_id: str) -> None:
        """The request gives back what `match` found: it cannot go on yet."""

    def remember(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The KV of so many first tokens is there: full blocks can be found by other requests."""

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """Block ids per KV group; 0 stands for blocks that need not exist."""

    def trim(self, request_id: str, num_computed_tokens: int) -> None:
        """Free blocks that no later token reads (outside a window)."""

    def free(self, request_id: str) -> None:
        """Give back everything the request holds."""

    def check_integrity(self) -> None:
        """AssertionError when blocks leaked or are held twice."""
