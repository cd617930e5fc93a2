"""Hold one engine step as the scheduler decided it: plain ints, so that it can be broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rayk.types.request import TokenLogprobs

UNKNOWN_TOKEN = -1
"""Stands for a token that the step before this one samples: ranks have it, the scheduler does not yet."""


class Rollback(NamedTuple):
    """Tells ranks to bring the recurrent states of a row back to those in the middle of its last step."""

    row: int
    num_kept: int  # the first so many tokens of that step


@dataclass(kw_only=True, slots=True)
class ScheduledRequest:
    """One request's share of a step. Filled by the scheduler, and changed by nobody afterwards. Not frozen:
    a step makes one for each of its requests, and would take three times as long for it."""

    request_id: str
    row: int  # persistent row of the engine's block tables, 0 .. max_seqs - 1
    num_computed_tokens: int  # tokens whose KV exists before this step, once those before it have run
    # the tokens computed in this step, at positions num_computed_tokens and on; the last may be UNKNOWN_TOKEN
    token_ids: tuple[int, ...]
    # per KV group: (index in the block table, new block ids)
    new_block_ids: tuple[tuple[int, tuple[int, ...]], ...]
    needs_logits: bool  # whether the last token's logits are sampled (false inside a chunked prefill)
    num_filled_blocks: tuple[int, ...] = ()
    """Per KV group: the first so many of the new ids hold KV of this request already, from a cache or another
    engine. Empty: none."""
    prompt_logits: tuple[int, int] = (0, 0)
    """[start, stop) in `token_ids`: tokens whose logits tell how likely the prompt's next token was."""
    num_drafts: int = 0
    """The last so many of `token_ids` are proposed: they count if sampling comes to them."""

    @property
    def num_logits(self) -> int:
        """Count the last tokens whose logits are sampled."""
        return 1 + self.num_drafts if self.needs_logits else 0

    def fresh_blocks(self) -> list[int]:
        """List the blocks handed out for this step: nothing in them is anybody's."""
        num_filled = self.num_filled_blocks or (0,) * len(self.new_block_ids)
        pairs = zip(self.new_block_ids, num_filled, strict=True)
        return [block for (_, ids), filled in pairs if ids for block in ids[filled:] if block]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    step: int
    requests: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)

    @property
    def num_logits(self) -> int:
        """Count the tokens whose logits are sampled."""
        return sum(r.num_logits for r in self.requests)

    def fresh_blocks(self) -> tuple[int, ...]:
        """List the blocks handed out for this step."""
        found: list[int] = []
        for r in self.requests:
            for _, ids in r.new_block_ids:
                if ids:  # most requests of a decode step get none
                    found += r.fresh_blocks()
                    break
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """Holds what a step came to, by request id. Filled by the sampler."""

    token_ids: Mapping[str, int]  # for requests without drafts that needed logits and got finite ones
    # for requests with drafts: those that were accepted, and the token after them unless its logits are not
    # finite, which the next step finds again
    accepted: Mapping[str, Sequence[int]] = field(default_factory=dict)
    not_finite: frozenset[str] = frozenset()  # those whose logits were not, and that got no token
    # for these tokens, in order, where asked for
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    # for the tokens of `prompt_logits`, in order
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
