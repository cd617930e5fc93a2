"""Find where the last tokens of a sequence stand earlier in it: what followed them there may follow again.

The rule is that of vLLM's NgramProposer (prompt lookup): of the last `longest` to `shortest` tokens the
longest run that stands earlier, too; of the places where it does the first; and what follows there. That
place may overlap the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, and its multiples are far apart: unlike runs of tokens get unlike numbers."""


class NgramIndex:
    """Knows the runs of one sequence, which only grows. A look-up takes as long however long it is.

    Runs are known by 64-bit hashes. One that is mistaken for another makes a worse draft, nothing else.
    """

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        """Index the sequence as it is now: 16 bytes for each run of each length."""
        assert 1 <= shortest <= longest, (shortest, longest)
        self._num_indexed = max(0, len(tokens) - 1)
        """The runs among so many first tokens are known: not those that end the sequence, which are looked
        for."""
        known = np.array(tokens[: self._num_indexed], dtype=np.uint64)
        self._runs = {length: _FirstEnds(known, length) for length in range(longest, shortest - 1, -1)}

    def propose(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """Return what followed the sequence's last tokens earlier, up to `num_tokens` tokens; nothing if they
        are new. `tokens`: those given before, and any that came since."""
        num_known = len(tokens)
        for length, runs in self._runs.items():
            for stop in range(max(self._num_indexed + 1, length), num_known):
                runs.add(tokens[stop - length : stop], stop)
        self._num_indexed = max(self._num_indexed, num_known - 1)
        for length, runs in self._runs.items():
            if num_known > length and (end := runs.find(tokens[-length:])) is not None:
                return list(tokens[end : end + num_tokens])
        return []


class _FirstEnds:
    """Where the first of each run of so many tokens ends: what was there at first in sorted arrays, what came
    later in a dictionary."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        num_runs = max(0, len(tokens) - length + 1)
        hashes = np.zeros(num_runs, dtype=np.uint64)
        for offset in range(length):
            hashes = (hashes ^ tokens[offset : offset + num_runs]) * np.uint64(_FACTOR)
        self._hashes, firsts = np.unique(hashes, return_index=True)
        self._ends = firsts + length
        self._later: dict[int, int] = {}

    def add(self, run: Sequence[int], end: int) -> None:
        """Note a run unless it was seen before."""
        self._later.setdefault(_hashed(run), end)

    def find(self, run: Sequence[int]) -> int | None:
        wanted = _hashed(run)
        at = int(self._hashes.searchsorted(np.uint64(wanted)))
        if at < len(self._hashes) and int(self._hashes[at]) == wanted:
            return int(self._ends[at])
        return self._later.get(wanted)


def _hashed(run: Sequence[int]) -> int:
    found = 0
    for token in run:
        found = ((found ^ token) * _FACTOR) & _MASK
    return found
