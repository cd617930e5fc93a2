"""Verify drafts: rows of logits behind proposed tokens, and which of them count.

A request with a draft of d tokens has 1 + d rows: one for each token of the draft and one for the token after
it. Each is sampled as if all proposed tokens before it were the request's own, which is so for the rows that
count: those up to the first whose token is another than the proposed one. By `match` a row's token is the one
that the engine would sample there without drafts. By `rejection` it is drawn so that it is more often the
proposed one, if the drafter drew that, too: see rejecting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayk.engine.filters import Row
from rayk.grammars import OutputGrammar
from rayk.kernels.best_tokens import NO_TOKEN

if TYPE_CHECKING:
    import numpy as np

    from rayk.sched.request_state import RequestState
    from rayk.types.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of a step in which requests have drafts."""

    states: list[RequestState]
    """The request of each row."""
    drafts: list[tuple[int, ...]]
    """What was proposed for each request that needs logits, in the order of the batch; empty for none."""

    @classmethod
    def of(cls, batch: ScheduledBatch, states: Sequence[RequestState]) -> DraftRows:
        """Lay them out. `states` are in the batch's order."""
        pairs = [(s, r) for s, r in zip(states, batch.requests, strict=True) if r.needs_logits]
        return cls(
            [state for state, share in pairs for _ in range(share.num_logits)],
            [share.token_ids[len(share.token_ids) - share.num_drafts :] for _, share in pairs],
        )

    def _requests(self) -> Iterator[tuple[int, RequestState, tuple[int, ...]]]:
        """Yield each request's first row, the request, and its draft."""
        at = 0
        for draft in self.drafts:
            yield at, self.states[at], draft
            at += 1 + len(draft)

    def rows(self, *, rejects: bool) -> list[Row]:
        """Say from what each row is sampled. `rejects`: by rejection, where tokens are drawn."""
        found = []
        for _, state, draft in self._requests():
            sampling, output = state.request.sampling, state.output_token_ids
            prompt = state.request.prompt_token_ids
            wanted: tuple[int | None, ...] = (None,) * (1 + len(draft))
            if rejects and sampling.temperature:
                wanted = (*draft, None)
            # Where a drafter drew, the logits that it drew each token from.
            drawn_from = (*state.drawn_from, *(None,) * (1 + len(draft)))
            found += [
                Row(sampling, prompt, [*output, *draft[:i]], w, None if w is None else drawn_from[i])
                for i, w in enumerate(wanted)
            ]
        return found

    def masks(self) -> list[np.ndarray[Any, Any]]:
        """List the masks of the rows whose requests have structured outputs, in order."""
        return [
            mask
            for _, state, draft in self._requests()
            if isinstance(state.form, OutputGrammar)
            for mask in state.form.masks(draft)
        ]

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """List the rows that count, given each row's token."""
        found: list[int] = []
        for at, _, draft in self._requests():
            end = at
            for proposed in draft:
                if tokens[end] != proposed:
                    break
                end += 1
            found += range(at, end + 1)
        return found

    def accepted(self, tokens: Sequence[int], kept: Sequence[int]) -> dict[str, list[int]]:
        """List the tokens that requests with drafts get, those before a row that is not finite."""
        drafted = {state.request_id for _, state, draft in self._requests() if draft}
        found: dict[str, list[int]] = {name: [] for name in drafted}
        for row in kept:
            name = self.states[row].request_id
            if name in drafted and tokens[row] != NO_TOKEN:
                found[name].append(tokens[row])
        return found
