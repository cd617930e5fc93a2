"""Ask for KV blocks: the protocol between the scheduler and their owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# per KV group: (first changed index of the block table, the ids from there on)
BlockUpdates = tuple[tuple[int, tuple[int, ...]], ...]


class BlockAllocator(Protocol):
    """Keeps block tables of running requests, over all KV groups at once."""

    def extend(self, request_id: str, num_tokens: int) -> BlockUpdates | None:
        """Make the request's tables hold `num_tokens` tokens. None (nothing changed) if blocks are short."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block of each KV group."""

    @property
    def num_free_blocks(self) -> int:
        """Count the blocks that requests can get."""

    @property
    def finds_prefixes(self) -> bool:
        """Whether `match` may give anything."""

    def num_missing_blocks(self, request_id: str, num_tokens: int) -> int:
        """Count the blocks that `extend` takes."""

    def max_new_blocks(self, num_tokens: int) -> int:
        """Count the most blocks that so many more tokens of any request take."""

    def match(
        self, request_id: str, token_ids: Sequence[int], max_tokens: int, cache_salt: str | None = None
    ) -> int:
        """Give a request without blocks those of its longest cached prefix of up to `max_tokens` tokens;
        returns its tokens. `cache_salt`: the request's, here as in all that follows."""

    def unmatch(self, request_id: str) -> None:
        """Take back what `match` gave: the request cannot go on yet."""

    def remember(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        cache_salt: str | None = None,
    ) -> None:
        """Let other requests find the full blocks of the request's first `num_computed_tokens` tokens, whose
        KV is there."""

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """Block ids per KV group; 0 stands for blocks that need not exist."""

    def trim(self, request_id: str, num_computed_tokens: int) -> None:
        """Free blocks that no later token reads (outside a window)."""

    def next_change(self, request_id: str) -> int:
        """Return the number of computed tokens at which `remember` or `trim` next has anything to do."""

    def free(self, request_id: str) -> None: ...

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks leaked or are held twice."""
