"""Say how often tokens are proposed after a request's last one, and how many of them are accepted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import neg


@dataclass(frozen=True, slots=True)
class DraftRates:
    """What a simulation cannot know of drafts. A draft's first so many tokens are accepted, so neither list
    ever grows."""

    accepted: tuple[float, ...]
    """Of the tokens proposed at each position of a draft, the share that is accepted: as reports tell it, and
    vLLM."""
    proposed: tuple[float, ...] = ()
    """Of the steps with room for it, the share that has a token at each position. Empty: every step has as
    many as there are positions."""

    def __post_init__(self) -> None:
        for shares in (self.accepted, self.proposed):
            assert all(0 <= share <= 1 for share in shares), shares
            assert list(shares) == sorted(shares, reverse=True), shares

    @classmethod
    def even(cls, chance: float, num_tokens: int, *, proposed: float = 1.0) -> DraftRates:
        """Take each token to be accepted with one chance, once those before it are; `proposed`: the share of
        steps that have drafts, of `num_tokens` tokens each."""
        chances = [chance] * num_tokens
        return cls(tuple(accumulate(chances, lambda a, b: a * b)), (proposed,) * num_tokens)

    @classmethod
    def counted(cls, num_steps: int, drafted_at: Sequence[int], accepted_at: Sequence[int]) -> DraftRates:
        """Take the rates of steps that were counted: `num_steps` that gave a request tokens after its first,
        and the tokens proposed and accepted in them, by position. Where later positions were accepted more
        often than those before them, which had more drafts, they count as these."""
        shares = [a / d for a, d in zip(accepted_at, drafted_at, strict=True) if d]
        most = max(1, num_steps)
        proposed = [min(1.0, d / most) for d in drafted_at if d]
        return cls(tuple(accumulate(shares, min)), tuple(accumulate(proposed, min)))

    @property
    def share_drafted(self) -> float:
        """Return the share of steps that have a draft."""
        return self.proposed[0] if self.proposed else float(bool(self.accepted))

    def num_proposed(self, draw: float) -> int:
        """Count the tokens of a draft, by a number drawn from [0, 1)."""
        return len(self.accepted) if not self.proposed else _num_over(self.proposed, draw)

    def num_accepted(self, draw: float) -> int:
        """Count how many of a draft's tokens are accepted, were there enough of them."""
        return _num_over(self.accepted, draw)

    def tokens_per_step(self, num_tokens: int) -> float:
        """Expect so many tokens of a step with room for `num_tokens` drafted ones."""
        proposed = self.proposed or (1.0,) * len(self.accepted)
        both = zip(self.accepted[:num_tokens], proposed, strict=False)
        return 1 + sum(accepted * share for accepted, share in both)

    def drafts_per_step(self, num_tokens: int) -> float:
        """Expect so many drafted tokens in such a step."""
        return sum(self.proposed[:num_tokens]) if self.proposed else min(num_tokens, len(self.accepted))


def _num_over(shares: Sequence[float], draw: float) -> int:
    """Count the first of these shares, which fall, that are over a number."""
    return bisect_left(shares, -draw, key=neg)
