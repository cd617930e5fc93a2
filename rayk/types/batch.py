"""One engine step, as the scheduler decided it: plain ints, so that it can be broadcast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRequest:
    """One request's share of a step. Filled by the scheduler."""

    request_id: str
    row: int
    """Persistent row of the engine's block tables, 0 .. max_seqs - 1."""
    num_computed_tokens: int
    """Tokens whose KV exists before this step."""
    token_ids: tuple[int, ...]
    """The tokens computed in this step, at positions num_computed_tokens and on."""
    new_block_ids: tuple[tuple[int, tuple[int, ...]], ...]
    """Per KV group: (index in the block table where the new ids go, new block ids)."""
    needs_logits: bool
    """Whether the last token's logits are sampled (false inside a chunked prefill)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """All requests of one step, decodes first."""

    step: int
    requests: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all requests."""
        return sum(len(r.token_ids) for r in self.requests)
