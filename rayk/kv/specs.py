"""What one layer keeps for its tokens. Each spec lowers itself to PageFields.

Nothing outside this file asks what kind of spec it has: it reads fields, and which token rows are live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rayk.kv.fields import ITEMSIZE, PageField


class KVCacheSpec(Protocol):
    """What a layer keeps per block. Hashable: layers with equal specs may share a KV group."""

    @property
    def kind(self) -> str:
        """A name people read: full, sliding."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def dtype(self) -> str:
        """Element type of the bound view."""
        ...

    def fields(self) -> tuple[PageField, ...]:
        """The page's fields, in the order they lie in the content axis."""
        ...

    def live_rows(self, num_tokens: int) -> range:
        """Token positions whose content a later token may still read, when `num_tokens` are computed."""
        ...


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of every token."""

    block_size: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    dtype: str
    num_query_heads: int

    @property
    def kind(self) -> str:
        """A name people read."""
        return "full"

    def fields(self) -> tuple[PageField, ...]:
        """K then V, packed in the content axis of each (head, token)."""
        size = ITEMSIZE[self.dtype]
        return tuple(
            PageField(
                name,
                self.num_kv_heads,
                self.block_size,
                head * size,
                self.dtype,
                self.num_query_heads,
            )
            for name, head in (("k", self.head_size_k), ("v", self.head_size_v))
        )

    def live_rows(self, num_tokens: int) -> range:
        """Every token."""
        return range(num_tokens)


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last `window` tokens, the current one included."""

    window: int

    @property
    def kind(self) -> str:
        """A name people read."""
        return "sliding"

    def live_rows(self, num_tokens: int) -> range:
        """The next token, at position num_tokens, sees keys > num_tokens - window."""
        return range(max(0, num_tokens + 1 - self.window), num_tokens)


def page_bytes(spec: KVCacheSpec) -> int:
    """Canonical bytes of one layer for one block: all units, no padding."""
    return sum(f.canonical_bytes for f in spec.fields())


def max_live_blocks(spec: KVCacheSpec, max_tokens: int, num_new_tokens: int = 0) -> int:
    """Most blocks of a sequence of up to `max_tokens` that hold live rows at once, wherever the window falls.

    `num_new_tokens`: rows that are being written beside them.
    """
    whole = -(-max_tokens // spec.block_size)
    rows = len(spec.live_rows(max_tokens)) + num_new_tokens
    # The first row may be the last of its block; the others fill blocks from their start.
    return min(whole, 1 + -(-(rows - 1) // spec.block_size))
