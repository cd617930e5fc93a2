"""Consecutive numbers out of a fixed range, lent first fit: bytes of a staging buffer, slots of a landing.
Pure."""

from __future__ import annotations

from bisect import insort


class Stretches:
    """Lends stretches of [0, size). A stretch begins at a multiple of `alignment`."""

    def __init__(self, size: int, alignment: int = 1) -> None:
        self._size = size
        self._alignment = alignment
        self._lent: list[tuple[int, int]] = []
        """[first, one behind the last), ascending."""

    @property
    def num_lent(self) -> int:
        """Stretches in use."""
        return len(self._lent)

    def take(self, count: int) -> range | None:
        """Return so many numbers, at least one, that nobody has; None where no gap is as long."""
        start = 0
        for first, stop in self._lent:
            if start + count <= first:
                break
            start = -(-stop // self._alignment) * self._alignment
        if start + count > self._size:
            return None
        insort(self._lent, (start, start + count))
        return range(start, start + count)

    def give_back(self, stretch: range) -> None:
        """Nobody uses it any more. ValueError where it is not lent."""
        self._lent.remove((stretch.start, stretch.stop))
