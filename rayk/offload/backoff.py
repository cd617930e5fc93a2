"""When to leave alone what failed several times in a row, and when to try it again. Pure.

What fails costs its wait each time. One failure may be chance; from the second in a row on nothing is tried
for a while, then one alone, and while that fails, too, the while doubles.
"""

from __future__ import annotations

IN_ROW = 2  # so many failures in a row, and there is a pause
FIRST_S, LONGEST_S = 5.0, 60.0  # the first pause, and the most that it grows to


class Backoff:
    """Pauses of one kind of attempt. Times are of one clock, in nanoseconds. Not for several threads."""

    def __init__(self) -> None:
        self._why = ""
        self._forget()

    def _forget(self) -> None:
        self._num_in_row = 0
        self._pause_ns = 0
        self._paused_ns = -1  # when the pause began that is, or was last
        self._until_ns = 0  # nothing is tried before

    def may_try(self, now_ns: int) -> bool:
        """Whether to try. After a pause one may, and counts as tried; nobody else before it ends well, or as
        long a pause has gone by in which nothing was heard of it."""
        if now_ns < self._until_ns:
            return False
        if self._pause_ns:
            self._until_ns = now_ns + self._pause_ns
        return True

    def nothing_tried(self, began_ns: int, now_ns: int) -> None:
        """An attempt ended before anything was tried: the next one may."""
        if began_ns > self._paused_ns:
            self._until_ns = min(self._until_ns, now_ns)

    def worked(self) -> None:
        self._forget()

    def failed(self, began_ns: int, now_ns: int, why: str) -> float:
        """An attempt failed. Seconds of the pause that begins with it; 0: none does. Those that began before
        the last pause tell nothing new."""
        if began_ns <= self._paused_ns:
            return 0.0
        self._why = why
        self._num_in_row += 1
        if self._num_in_row < IN_ROW:
            return 0.0
        longest_ns = int(LONGEST_S * 1e9)
        self._pause_ns = min(2 * self._pause_ns or int(FIRST_S * 1e9), longest_ns)
        self._paused_ns, self._until_ns = now_ns, now_ns + self._pause_ns
        return self._pause_ns / 1e9

    def describe(self, now_ns: int) -> str:
        """Say why nothing is tried, or one alone; empty where all are."""
        if not self._pause_ns:
            return ""
        left_s = max(0, self._until_ns - now_ns) / 1e9
        return f"{self._num_in_row} failed in a row, the next is tried in {left_s:.1f} s: {self._why}"
