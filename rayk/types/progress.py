"""Watch a run of a matrix."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told by the driver: plan once, phases until the first cell, then begin and end of every cell; warnings
    any time."""

    def plan(self, num_cells: int, num_finished: int) -> None:
        """The matrix is known; `num_finished` cells are on disk from an earlier run."""

    def phase(self, text: str) -> None:
        """Tell of a step before the first cell, e.g. `starting Ray`."""

    def warn(self, text: str) -> None:
        """Tell what the user may not have meant, or should know when reading the results."""

    def begin(self, cell_id: str) -> None: ...

    def end(self, cell_id: str, verdict: str, reason: str) -> None:
        """The cell is on disk."""
