"""Requests go to the engines of each side in turn."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from rayk.sched.policies import Asked, EngineLoad, Placed


class RoundRobin:
    """Prefill engines in turn; after each round of them the next decode engine comes first.

    Engines of a side get equal shares, and every pair of engines gets requests.
    """

    def __init__(self) -> None:
        self._count = 0

    def place(self, asked: Asked, prefill: Sequence[EngineLoad], decode: Sequence[EngineLoad]) -> Placed:
        """The next of each side."""
        del asked
        index = self._count
        self._count += 1
        producer = prefill[index % len(prefill)].name
        if not decode:
            return Placed(prefill=producer, decode=None)
        # Without the round, 2 x 2 engines would only ever meet on the diagonal.
        turn = index + index // lcm(len(prefill), len(decode))
        return Placed(prefill=producer, decode=decode[turn % len(decode)].name)

    def ended(self, asked: Asked, placed: Placed) -> None:
        """No matter."""

    def lost(self, engine: str) -> None:
        """No matter."""
