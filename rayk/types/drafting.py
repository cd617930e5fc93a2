"""Hold what a drafter on ranks is to do after a step: plain ints, so that it can be broadcast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayk.types.allocator import BlockUpdates


class DraftShare(NamedTuple):
    """One request's share. Filled by the scheduler once the tokens of the step are known."""

    num_kept: int
    """The first so many tokens of its share of the step are its own; 0: nothing is done for it."""
    next_token: int
    """Its token after these."""
    num_proposed: int
    """Tokens to propose after that one."""
    new_block_ids: BlockUpdates = ()
    """Blocks for rows of the proposed tokens, as in ScheduledRequest; empty: there are enough."""
    temperature: float = 0.0
    """At which the drafter draws what it proposes; 0: it takes the likeliest."""
    seed: int = 0
    """The request's, where tokens are drawn."""
    index: int = 0
    """Number of its output tokens so far."""


DraftPlan = tuple[DraftShare, ...]
"""In the order of the step's requests."""
NOTHING = DraftShare(0, 0, 0)


def fresh_blocks(plan: DraftPlan) -> tuple[int, ...]:
    """List the blocks that are handed out with a plan."""
    return tuple(block for share in plan for _, ids in share.new_block_ids for block in ids if block)


def encode_plan(plan: DraftPlan) -> bytes:
    """Pack a plan; `decode_plan` is the inverse. Layout, int64: per request [num_kept, next_token,
    num_proposed, bits of the temperature, seed, index, num_groups], per group [start, num_ids, ids...]."""
    words: list[int] = []
    for share in plan:
        bits = int(np.float64(share.temperature).view(np.int64))
        words += (share.num_kept, share.next_token, share.num_proposed, bits, share.seed, share.index)
        words.append(len(share.new_block_ids))
        for start, ids in share.new_block_ids:
            words += (start, len(ids), *ids)
    return np.array(words, dtype=np.int64).tobytes()


def decode_plan(payload: bytes) -> DraftPlan:
    """Unpack what `encode_plan` made."""
    return tuple(_shares(np.frombuffer(payload, dtype=np.int64).tolist()))


def _shares(words: Sequence[int]) -> Iterator[DraftShare]:
    at = 0
    while at < len(words):
        num_kept, next_token, num_proposed, bits, seed, index, num_groups = words[at : at + 7]
        at += 7
        updates: list[tuple[int, tuple[int, ...]]] = []
        for _ in range(num_groups):
            start, count = words[at : at + 2]
            updates.append((start, tuple(words[at + 2 : at + 2 + count])))
            at += 2 + count
        temperature = float(np.int64(bits).view(np.float64))
        yield DraftShare(num_kept, next_token, num_proposed, tuple(updates), temperature, seed, index)
