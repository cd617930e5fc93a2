"""Send requests to the engines of each side in turn."""

from __future__ import annotations

from math import lcm

from rayk.sched.policy import EngineSet, Placement, PlacementRequest


class RoundRobin:
    """Takes prefill engines in turn; after each round of them the next decode engine comes first. Engines of
    a side get equal shares, and every pair of engines gets requests."""

    def __init__(self) -> None:
        self._count = 0

    def place(self, request: PlacementRequest, prefill: EngineSet, decode: EngineSet) -> Placement:
        del request
        index = self._count
        self._count += 1
        producer = prefill[index % len(prefill)].name
        if not decode:
            return Placement(prefill=producer, decode=None)
        # Without the round, 2 x 2 engines would only ever meet on the diagonal.
        turn = index + index // lcm(len(prefill), len(decode))
        return Placement(prefill=producer, decode=decode[turn % len(decode)].name)

    def ended(self, request: PlacementRequest, placed: Placement) -> None: ...

    def lost(self, engine: str) -> None: ...
