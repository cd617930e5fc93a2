"""What of a draft is accepted, by position: of a head's drafts, and of a table of successors beside it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jobs.draft_head import Head
from jobs.draft_text import Seen, Target, Text
from rayk.types.errors import UserError

LONGEST = 4
"""Tokens of the longest drafts that are measured."""
CONTEXT = 4
"""Tokens before a draft by which it is looked up among the texts learned from."""

# R rows, see draft_head; K tokens of a draft


@dataclass
class Tally:
    """What was accepted of drafts of `num_tokens` tokens each."""

    num_tokens: int
    num_drafts: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    """Drafts of which so many tokens, 1 or more, were accepted at least."""
    num_seen: int = 0
    """Drafts whose first token could have been learned by heart."""

    def at_least(self, num_tokens: int) -> float:
        """Share of the drafts of which so many tokens were accepted."""
        return self.accepted[num_tokens] / self.num_drafts

    @property
    def per_draft(self) -> float:
        """Tokens accepted of a draft, on average."""
        return self.accepted.total() / self.num_drafts

    def add(self, drafts_RK: Tensor, text: Text, known: set[tuple[int, ...]]) -> None:
        """Count what an engine would accept of the drafts while it writes the answer.

        drafts_RK:  row r: the tokens drafted behind token r + 1.
        known:      the runs of CONTEXT + 1 tokens in the texts learned from.
        """
        ids, k, row = text.token_ids, self.num_tokens, text.answer - 1
        while row + 2 + k <= len(ids):
            right = ids[row + 2 : row + 2 + k]
            hits = 0
            while hits < k and int(drafts_RK[row, hits]) == right[hits]:
                hits += 1
            self.num_drafts += 1
            self.accepted.update(range(1, hits + 1))
            self.num_seen += tuple(ids[max(row + 2 - CONTEXT, 0) : row + 3]) in known
            row += hits + 1


def known_runs(texts: Sequence[Text]) -> set[tuple[int, ...]]:
    """All runs of CONTEXT + 1 tokens."""
    size = CONTEXT + 1
    return {
        tuple(text.token_ids[i : i + size]) for text in texts for i in range(len(text.token_ids) - size + 1)
    }


Drafter = Callable[[Seen], Tensor]
"""Gives what is drafted behind every token but the first, [R, LONGEST]."""


def head_drafter(head: Head, target: Target) -> Drafter:
    """Drafts by a head, greedily, each from the model's hidden states of all tokens before it."""

    @torch.no_grad()
    def drafts(seen: Seen) -> Tensor:
        steps = head.unroll(seen.states[None, :-1], seen.tokens[None, 1:], target.embed, LONGEST, own=True)
        # Step s of a draft is in row r + s. What rolls over from the first rows is no draft, and no text is
        # as long as those.
        return torch.stack([head.best(hidden)[0].roll(-s) for s, hidden in enumerate(steps)], dim=-1)

    return drafts


def successor_drafter(texts: Sequence[Text]) -> Drafter:
    """Drafts by a table of what most frequently follows each token in the texts."""
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for token, follower, is_own in zip(
            text.token_ids[:-1], text.token_ids[1:], text.own[1:], strict=True
        ):
            if is_own:
                counts[token][follower] += 1
    best = {token: followers.most_common(1)[0][0] for token, followers in counts.items()}

    def drafts(seen: Seen) -> Tensor:
        columns = [seen.tokens[1:].tolist()]
        for _ in range(LONGEST):
            columns.append([best.get(token, token) for token in columns[-1]])
        return torch.tensor(columns[1:]).T

    return drafts


def tallies(drafter: Drafter, seen: Sequence[Seen], known: set[tuple[int, ...]]) -> list[Tally]:
    """Measure drafts of 1 to LONGEST tokens. Raises UserError if the texts are too short for one."""
    found = [Tally(k) for k in range(1, LONGEST + 1)]
    for each in seen:
        drafts_RK = drafter(each)
        for tally in found:
            tally.add(drafts_RK, each.text, known)
    if not all(tally.num_drafts for tally in found):
        raise UserError(
            f"no held-out answer has {LONGEST + 1} tokens", mend="more --held-out or --max-tokens"
        )
    return found
