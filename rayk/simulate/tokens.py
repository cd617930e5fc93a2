"""Choose the tokens of simulated requests: any that go on, and the one that ends an output where it ends."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from zlib import crc32

from rayk.models.config import DecoderConfig
from rayk.types.admission import outside_vocabulary
from rayk.types.draft_rates import DraftRates

PROMPTS_KEPT = 1024
"""So many prompts are known, the last ones."""


class SimOutput:
    """The tokens of one request's output."""

    __slots__ = ("_cycle", "_end", "_start", "drafts", "drawn_by", "length", "names")

    def __init__(
        self,
        cycle: list[int],
        end: int,
        start: int,
        length: int | None,
        drafts: DraftRates | None = None,
        drawn_by: str = "",
    ) -> None:
        """It goes through `cycle` from `start` on, and ends with `end` after `length` tokens if that is
        known. `drafts`: how often these are right, drawn by `drawn_by`; None: as of any request."""
        self._cycle, self._end, self._start = cycle, end, start
        self.drafts, self.drawn_by = drafts, drawn_by
        self.length = sys.maxsize if length is None else length
        self.names: list[str] = []
        """The attempts that asked for it."""

    def token(self, number: int) -> int:
        """Tell the token of this number, from 1."""
        return self._end if number == self.length else self._cycle[(self._start + number) % len(self._cycle)]

    def tokens(self, number: int, count: int) -> list[int]:
        """List the tokens of this number, from 1, and those after it."""
        cycle = self._cycle
        start = (self._start + number) % len(cycle)
        found = cycle[start : start + count]
        while len(found) < count:
            found += cycle[: count - len(found)]
        if 0 <= (end := self.length - number) < count:
            found[end] = self._end
        return found


class TokenRule:
    """Tells a request's n-th output token. Outputs of two requests differ where those of real ones would, so
    that a prefix cache keeps and finds as much of them."""

    def __init__(self, config: DecoderConfig) -> None:
        self.end = min(config.eos_token_ids, default=config.vocab_size - 1)
        """The only token that ends an output before its limit."""
        self._cycle = [t for t in range(config.vocab_size) if t != self.end]
        """The tokens of every output, which begins somewhere in it."""
        self._outputs: dict[str, SimOutput] = {}
        """They are kept by the names of requests and of their attempts."""
        self._vocab_size = config.vocab_size
        self._prompts: dict[int, tuple[Sequence[int], int, bool]] = {}
        """By its id, a prompt that many requests may share, where its output begins, and whether its tokens
        are of the vocabulary."""

    def begin(
        self,
        request_id: str,
        *,
        prompt: Sequence[int] | None = None,
        num_output_tokens: int | None = None,
        drafts: DraftRates | None = None,
        drawn_by: str | None = None,
    ) -> None:
        """A request comes, whose output ends with so many tokens; None: at its limit. `prompt`: requests of
        one prompt get the same tokens, as of a model that draws none. `drafts`: how often its drafts are
        right; None: as of any request. `drawn_by`: what that is drawn by; None: its name."""
        start = crc32(request_id.encode()) if prompt is None else self._begin_of(prompt)
        by = request_id if drawn_by is None else drawn_by
        self._outputs[request_id] = SimOutput(self._cycle, self.end, start, num_output_tokens, drafts, by)

    def other_than(self, token: int) -> int:
        """Return some other token of the vocabulary."""
        return self._cycle[0] if token == self.end else self.end

    def _begin_of(self, prompt: Sequence[int]) -> int:
        known = self._prompts.get(id(prompt))
        if known is None:
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            is_inside = outside_vocabulary(prompt, self._vocab_size) is None
            known = self._prompts[id(prompt)] = prompt, crc32(array("q", prompt)), is_inside
        return known[1]

    def knows(self, prompt: Sequence[int]) -> bool:
        """Tell whether this very prompt was looked at, and has tokens of the vocabulary alone."""
        known = self._prompts.get(id(prompt))
        return known is not None and known[2]

    def forget(self, request_id: str) -> None:
        """A request is over."""
        found = self._outputs.pop(request_id, None)
        for name in found.names if found is not None else ():
            del self._outputs[name]

    def output(self, request_id: str) -> SimOutput:
        """Find a request's output, by its name or that of one of its attempts, which get the same."""
        found = self._outputs.get(request_id)
        if found is None:
            name = request_id.partition("~")[0]
            if name not in self._outputs:
                self.begin(name)
            found = self._outputs[name]
            if name != request_id:
                found.names.append(request_id)
                self._outputs[request_id] = found
        return found
