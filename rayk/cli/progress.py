"""A run's progress on stderr: a bar on a terminal, one line per cell elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rayk.cli.guard import stderr

STYLES = {"PASS": "green", "NEAR_TIE": "yellow", "UNSUPPORTED": "dim"}


class RunProgress:
    """Implements experiments.run.Progress; a context manager that owns the bar."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or stderr()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
            # Cells take seconds to minutes: remember all of them.
            speed_estimate_period=3600,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._num_cells = 0
        self._num_done = 0

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, cell_ids: Sequence[str], finished: Mapping[str, str]) -> None:
        """All cells in order, and the verdicts of those an earlier run finished."""
        self._num_cells, self._num_done = len(cell_ids), len(finished)
        self._bar.update(self._task, total=self._num_cells, completed=self._num_done)
        if finished:
            self.console.print(f"resuming: {self._num_done} of {self._num_cells} cells are on disk")

    def started(self, cell_id: str) -> None:
        """A cell begins."""
        self._bar.update(self._task, description=cell_id)

    def ended(self, cell_id: str, verdict: str, reason: str, wall_s: float) -> None:
        """A cell is on disk."""
        self._num_done += 1
        width = len(str(self._num_cells))
        line = Text.assemble(
            f"{self._num_done:>{width}}/{self._num_cells} ",
            (f"{verdict:<14}", STYLES.get(verdict, "bold red")),
            f" {cell_id}  {wall_s:.1f} s",
            f"\n    {reason}" if reason else "",
        )
        self.console.print(line)
        self._bar.update(self._task, completed=self._num_done)
