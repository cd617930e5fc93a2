"""Hold what a drafter on ranks is to do after a step: plain numbers, so that it can be broadcast."""

from __future__ import annotations

from typing import NamedTuple

from rayk.types.allocator import BlockUpdates


class DraftShare(NamedTuple):
    """One request's share. Filled by the scheduler once the tokens of the step are known."""

    num_kept: int
    """Rows to compute: those of the first so many tokens of its share of the step; 0: nothing is done."""
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
    output_index: int = 0
    """Number of its output tokens so far."""
    first_row: int = 0
    """Position of `token_ids`."""
    token_ids: tuple[int, ...] = ()
    """Tokens, `num_kept` of them, whose rows are computed in place of those of the step: rows that lacked."""


DraftPlan = tuple[DraftShare, ...]
"""In the order of the step's requests."""
NOTHING = DraftShare(0, 0, 0)


def fresh_blocks(plan: DraftPlan) -> tuple[int, ...]:
    """List the blocks that are handed out with a plan."""
    return tuple(block for share in plan for _, ids in share.new_block_ids for block in ids if block)
