"""The comms of parts of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayk.parallel.comm import Comm


class Parts:
    """The parts that a rank of a group is in: they end with the group, and wait as long as it does."""

    def __init__(self) -> None:
        self._comms: list[Comm] = []

    def add(self, part: Comm) -> Comm:
        """Keep a part; returns it."""
        self._comms.append(part)
        return part

    def wait_for(self, timeout_s: float) -> None:
        """Set how long a rank waits for its peers in every part."""
        for part in self._comms:
            part.timeout_s = timeout_s

    def close(self) -> None:
        for part in self._comms:
            part.close()
        self._comms.clear()


def index_in(ranks: Sequence[int], rank: int, size: int) -> int:
    """Find the rank's number in a part of a group of `size`."""
    assert len(set(ranks)) == len(ranks), ranks
    assert set(ranks) <= set(range(size)), (ranks, size)
    assert rank in ranks, (rank, ranks)
    return list(ranks).index(rank)
