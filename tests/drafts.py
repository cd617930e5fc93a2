"""Drafts whose quality tests choose: a prophet knows what requests will say, and errs now and then."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import pytest

from rayk.sched.drafting import NgramDrafter
from rayk.sched.request_state import RequestState
from rayk.types.speculative import SpeculativeConfig

NGRAM = SpeculativeConfig(method="ngram", num_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
"""A single token is looked up, too: of random prompts most proposals are wrong."""


class Prophet:
    """Takes the place of what n-gram drafters look up. Counts what it proposed, and what was right of it."""

    def __init__(self, outputs: Mapping[str, Sequence[int]], *, err_every: int = 6) -> None:
        """`outputs`: by request; others get no drafts. `err_every`: one proposed token in so many is wrong,
        one draft in so many is not made; 0: all are right."""
        self._outputs = outputs
        self._err_every = err_every

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> Prophet:
        """Ask it from now on."""
        monkeypatch.setattr(NgramDrafter, "propose", lambda _, state, num: self.propose(state, num))
        return self

    def propose(self, state: RequestState, num_tokens: int) -> list[int]:
        output, start = self._outputs.get(state.request_id, ()), len(state.output_token_ids)
        drafts = list(output[start : start + num_tokens])
        for i in range(len(drafts)):
            mood = self._mood(state.request_id, start + i)
            if mood == 0:
                drafts[i] = other_than(drafts[i])
            elif mood == 1 and i == 0:
                return []
        return drafts

    def _mood(self, request_id: str, index: int) -> int:
        if not self._err_every:
            return -1
        return zlib.crc32(f"{request_id}/{index}".encode()) % self._err_every


def other_than(token: int) -> int:
    """Another token of any vocabulary."""
    return token - 1 if token else 1
