"""What is right in a simulated world: the rows and tokens of a request, and what engines hand each other."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, Mamba1Spec, SlidingWindowSpec
from rayk.transfer.simulator.core import num_blocks
from rayk.transfer.simulator.memory import BLOCK_SIZE, HEADS, NULL, Memory, Row

MAX_POSITIONS = 24
MAX_OUTPUT = 4
"""Output tokens of a request, the first of which is sampled where its prompt is computed."""
WINDOW = 4
Tables = tuple[tuple[int, ...], ...]

_HEADS = {"num_kv_heads": len(HEADS), "num_query_heads": len(HEADS), "head_size_k": 8, "head_size_v": 8}
_FULL = FullAttentionSpec(block_size=BLOCK_SIZE, dtype="float32", **_HEADS)
_WINDOW = SlidingWindowSpec(block_size=BLOCK_SIZE, dtype="float32", window=WINDOW, **_HEADS)
_STATE = Mamba1Spec(block_size=1 << 10, dtype="float32", conv_width=4, num_channels=8, state_size=4)


_SPECS: dict[str, KVCacheSpec] = {"full": _FULL, "window": _WINDOW, "state": _STATE}


@dataclass(frozen=True, slots=True)
class Model:
    """Two layers: one of full attention, and one that is another such, or keeps a window or a state."""

    late: str
    """What the second keeps: full, window or state."""

    @property
    def is_hybrid(self) -> bool:
        """Whether the second layer is recurrent."""
        return self.late == "state"

    @property
    def late_layers(self) -> tuple[int, ...]:
        """Layers of which only what lives at the end is kept."""
        return () if self.late == "full" else (1,)

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """One per layer."""
        return (KVCacheGroup(0, _FULL, (0,), 1), KVCacheGroup(1, _SPECS[self.late], (1,), 1))

    def live_rows(self, layer: int, num_tokens: int) -> range:
        """Positions whose rows are needed to go on after so many tokens."""
        return (_SPECS[self.late] if layer else _FULL).live_rows(num_tokens)

    def place(self, layer: int, position: int) -> tuple[int, int]:
        """(index into the block table, row of the block) of a position."""
        return (0, 0) if layer == 1 and self.is_hybrid else divmod(position, BLOCK_SIZE)

    def pieces(self, layer: int, num_tokens: int) -> tuple[tuple[int, int, int, int], ...]:
        """Live rows block by block: (index into the block table, first row, row after the last, position of
        the first)."""
        return _pieces(self, layer, num_tokens)

    def first_block(self, layer: int, num_tokens: int) -> int:
        """Blocks before this are null: nothing in them lives."""
        if layer == 0 or self.is_hybrid:
            return 0
        return self.live_rows(layer, num_tokens).start // BLOCK_SIZE

    def take(self, memory: Memory, holder: str, num_tokens: int, room: int) -> Tables | None:
        """Blocks for `num_tokens` tokens, of which the live ones have rows, and `room` more; None if there
        are too few."""
        counts = []
        for layer in (0, 1):
            total = 1 if layer and self.is_hybrid else num_blocks(num_tokens + room)
            counts.append((self.first_block(layer, num_tokens), total))
        blocks = memory.take(holder, sum(total - first for first, total in counts))
        if blocks is None:
            return None
        (_, total), (first, _) = counts
        return tuple(blocks[:total]), (NULL,) * first + tuple(blocks[total:])


@functools.cache
def _pieces(model: Model, layer: int, num_tokens: int) -> tuple[tuple[int, int, int, int], ...]:
    found: dict[int, list[int]] = {}
    for position in model.live_rows(layer, num_tokens):
        index, row = model.place(layer, position)
        found.setdefault(index, [row, row, position])[1] = row
    return tuple((index, first, last + 1, at) for index, (first, last, at) in found.items())


@functools.cache
def right_rows(prompt: int, layer: int, head: int) -> list[Row]:
    """What the row of each position must hold."""
    return [(prompt, layer, head, position) for position in range(MAX_POSITIONS)]


def right_token(prompt: int, index: int) -> int:
    """Output token `index` of a prompt."""
    return prompt * 100 + index


WRONG_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of a request."""

    job_id: str
    prompt: int
    num_tokens: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SealedTables:
    """Block tables that are not used when they were changed under way."""

    tables: Tables
    generations: Tables
    seal: int

    @staticmethod
    def of(tables: Tables, memory: Memory) -> SealedTables:
        """With the generations of now."""
        generations = tuple(tuple(memory.generations[b] for b in table) for table in tables)
        return SealedTables(tables, generations, hash((tables, generations)))

    @property
    def is_whole(self) -> bool:
        """Whether they are what was sealed."""
        return self.seal == hash((self.tables, self.generations))

    def corrupted(self) -> SealedTables:
        """Another block in place of one."""
        (first, *rest), *others = self.tables
        return SealedTables(((first + 1, *rest), *others), self.generations, self.seal)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a producer hands to a consumer; see transfer.ticket."""

    job: Job
    lease_id: str
    producer: str
    epoch: int
    blocks: SealedTables
    digests: dict[tuple[int, int], tuple[Row, ...]]
    """(layer, head) -> live rows, each its own digest."""
    lease_ns: int
    attempt: int
    """Of the push."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a consumer hands to a producer before a push; see transfer.ticket.Reservation."""

    reservation_id: str
    consumer: str
    epoch: int
    blocks: SealedTables
