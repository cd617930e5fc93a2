"""One engine step, as the scheduler decided it: plain ints, so that it can be broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayk.types.request import TokenLogprobs


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
    prompt_logits: tuple[int, int] = (0, 0)
    """[start, stop) in `token_ids`: tokens whose logits tell how likely the prompt's next token was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """All requests of one step, decodes first."""

    step: int
    requests: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step over all requests."""
        return sum(len(r.token_ids) for r in self.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """What a step came to, by request id. Filled by the sampler."""

    token_ids: Mapping[str, int]
    """Of the requests that needed logits."""
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    """Of these tokens, where asked for."""
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Of the prompt tokens that `prompt_logits` was about, in order."""
