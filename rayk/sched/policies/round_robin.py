"""Requests go to the engines of each side in turn."""

from __future__ import annotations

from math import lcm

from rayk.types.request import Request


class RoundRobin:
    """Prefill engines in turn; after each round of them the next decode engine comes first.

    Engines of a side get equal shares, and every pair of engines gets requests.
    """

    def __init__(self) -> None:
        self._count = 0

    def place(self, request: Request, num_prefill: int, num_decode: int) -> tuple[int, int]:
        """(prefill engine index, decode engine index)."""
        del request
        index = self._count
        self._count += 1
        # Without the round, 2 x 2 engines would only ever meet on the diagonal.
        return index % num_prefill, (index + index // lcm(num_prefill, num_decode)) % num_decode
