"""Settings of speculative decoding: who proposes tokens, how many, and when a proposal counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from rayk.types.bounds import MAX_DRAFTS, Between, OneOf

METHODS = ("ngram", "draft", "eagle3", "mtp")
ACCEPTS = ("match", "rejection")
DRAFT_KVS = ("auto", "recompute", "hidden", "none")
HEEDED_BY_ALL = ("num_tokens", "accept")
HEEDED = {
    "ngram": (*HEEDED_BY_ALL, "prompt_lookup_max", "prompt_lookup_min"),
    "draft": (*HEEDED_BY_ALL, "model", "tp", "draft_kv"),
    "eagle3": (*HEEDED_BY_ALL, "model", "tp", "draft_kv"),
    "mtp": (*HEEDED_BY_ALL, "tp", "draft_kv"),
}
"""Method -> the settings that its drafters heed."""
assert tuple(HEEDED) == METHODS, "every method heeds something"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """A drafter proposes tokens after a request's last one, and a step of the model computes them all."""

    method: Annotated[str, OneOf(METHODS)]
    """ngram: what followed the same tokens earlier in the request; draft: a smaller model; eagle3: a head
    that takes hidden states of the model; mtp: the multi-token prediction layers of the model's own
    checkpoint."""
    model: str | None = None
    """Checkpoint of a draft model or an EAGLE-3 head."""
    num_tokens: Annotated[int, Between(1, MAX_DRAFTS)] = 3
    """Tokens that are proposed at most, one after the other."""
    accept: Annotated[str, OneOf(ACCEPTS)] = "match"
    """match: a proposal counts if it is the token that the engine would have drawn without drafts. rejection:
    the drafter draws, and its draws are kept as often as the model's distribution allows."""
    tp: Annotated[int, Between(1, 64)] | None = None
    """Ranks that share the drafter: 1 or as many as share the model; None: 1, each rank has all of it."""
    draft_kv: Annotated[str, OneOf(DRAFT_KVS)] = "auto"
    """How a drafter on ranks gets its KV of a prompt that came without: recompute: from the tokens; hidden:
    from hidden states that come with the prompt; none: not at all, and such requests are not drafted for;
    auto: what the costs say."""
    prompt_lookup_max: Annotated[int, Between(1, 64)] = 4
    """ngram: the longest run of last tokens that is looked for."""
    prompt_lookup_min: Annotated[int, Between(1, 64)] = 2
    """ngram: the shortest."""


@dataclass(slots=True)
class DraftCounts:
    """Counts drafts of an engine or of a request. Filled by the scheduler, as steps are accounted for.

    A draft is what is proposed at once: one to `num_tokens` tokens, of which the first so many are accepted.
    """

    drafted_at: list[int] = field(default_factory=list)
    """How many tokens were proposed, by position in the draft."""
    accepted_at: list[int] = field(default_factory=list)
    """How many of these the model agreed to, those included that an end of the request cut."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count one draft."""
        assert 0 <= num_accepted <= num_drafted, (num_accepted, num_drafted)
        missing = [0] * (num_drafted - len(self.drafted_at))
        self.drafted_at += missing
        self.accepted_at += missing
        for position in range(num_drafted):
            self.drafted_at[position] += 1
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    @property
    def num_drafts(self) -> int:
        """Count the steps of a request that had a draft."""
        return self.drafted_at[0] if self.drafted_at else 0

    @property
    def num_draft_tokens(self) -> int:
        """Count the tokens proposed."""
        return sum(self.drafted_at)

    @property
    def num_accepted_tokens(self) -> int:
        """Count the proposed tokens that the model agreed to."""
        return sum(self.accepted_at)
