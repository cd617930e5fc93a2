"""Find the plans that no other plan is better than, and the highest rate that keeps a limit."""

from __future__ import annotations

from collections.abc import Sequence

GROWTH = 1.4


def on_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Tell which points no other beats: better on one axis, and as good on the other. More is better on both;
    of equal points all are on the front."""
    order = sorted(range(len(points)), key=lambda i: points[i], reverse=True)
    found = [False] * len(points)
    best_y = float("-inf")  # among points with a greater x
    at = 0
    while at < len(order):
        x = points[order[at]][0]
        same = [i for i in order[at:] if points[i][0] == x]
        highest = max(points[i][1] for i in same)
        for i in same:
            found[i] = points[i][1] == highest and highest > best_y
        best_y = max(best_y, highest)
        at += len(same)
    return found


class RateSearch:
    """Finds the highest rate that keeps a limit, if all lower ones do: grows or shrinks by GROWTH until one
    keeps it and one does not, then halves the way between them in logarithms."""

    def __init__(
        self, start: float, *, ceiling: float = float("inf"), precision: float = 0.03, max_runs: int = 8
    ) -> None:
        """`ceiling`: no rate above it can keep the limit. `precision`: of the rate, as a share of it."""
        start = min(start, ceiling)
        self.low = 0.0
        """The highest rate that is known to keep the limit; 0: none is."""
        self.high: float | None = None
        """The lowest that is known not to."""
        self._rate = start
        self._ceiling, self._precision = ceiling, precision
        self.num_runs, self._max_runs = 0, max_runs

    @property
    def next_rate(self) -> float | None:
        """The rate to try next; None: it is found, or tried often enough."""
        high = self._ceiling if self.high is None else self.high
        near = self.low and high <= self.low * (1 + self._precision)
        return None if near or self.num_runs >= self._max_runs else self._rate

    def note(self, *, keeps: bool) -> None:
        """Say what became of `next_rate`."""
        self.num_runs += 1
        if keeps:
            self.low = self._rate
        else:
            self.high = self._rate
        if self.high is None:
            self._rate = min(self.low * GROWTH, self._ceiling)
        elif not self.low:
            self._rate = self.high / GROWTH
        else:
            self._rate = (self.low * self.high) ** 0.5
