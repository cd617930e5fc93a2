"""Show a run's progress on stderr: a bar on a terminal, one line per cell elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

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
from rayk.types.waiting import Waiting

if TYPE_CHECKING:
    from rayk.planner.trial import TrialResult

STYLES = {"PASS": "green", "NEAR_TIE": "yellow", "UNSUPPORTED": "dim", "PREDICTED": "cyan"}


class RunProgress:
    """Implements types.progress.Progress as a context manager that owns the bar."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or stderr()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tally]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
            # Cells take seconds to minutes: remember all of them.
            speed_estimate_period=3600,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("starting", total=None, tally="")
        self._tally: Counter[str] = Counter()  # verdicts of this session
        self._num_cells = 0
        self._began = time.monotonic()
        self._num_done = 0
        self._num_here = 0  # cells that ran in this session
        self._first_began = 0.0
        self._waiting = Waiting(lambda line: self.console.print(line, markup=False))

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._waiting.end()
        self._bar.stop()

    def plan(self, num_cells: int, num_finished: int) -> None:
        self._num_cells, self._num_done = num_cells, num_finished
        self._bar.update(self._task, total=num_cells, completed=num_finished)
        if num_finished:
            left = f"{num_cells - num_finished} left"
            self.console.print(f"resuming: {num_finished} of {num_cells} cells are on disk, {left}")

    def phase(self, text: str) -> None:
        """Change the bar's words on a terminal; elsewhere print a line, and more of them if it lasts."""
        self._bar.update(self._task, description=text)
        if not self.console.is_terminal:  # the bar says how long
            self.console.print(text, markup=False)
            self._waiting.begin(text)

    def warn(self, text: str) -> None:
        self.console.print(Text.assemble(("rayk: warning: ", "bold yellow"), text))

    def interrupted(self) -> None:
        """Take the bar away after a signal, and say what is going on."""
        self._waiting.end()
        self._bar.stop()
        self.console.print("rayk: stopping the workers (once more to stop at once)")

    def summary(self) -> str:
        if not self._num_cells:
            return "no cell was planned yet"
        return f"{self._num_done} of {self._num_cells} cells are finished"

    def begin(self, cell_id: str) -> None:
        self._waiting.end()
        self._began = time.monotonic()
        self._first_began = self._first_began or self._began
        self._bar.update(self._task, description=cell_id)

    def end(self, cell_id: str, verdict: str, reason: str) -> None:
        self._num_done += 1
        self._num_here += verdict != "UNSUPPORTED"
        width = len(str(self._num_cells))
        seconds = 0.0 if verdict == "UNSUPPORTED" else time.monotonic() - self._began
        line = Text.assemble(
            f"{self._num_done:>{width}}/{self._num_cells} ",
            (f"{verdict:<14}", STYLES.get(verdict, "bold red")),
            f" {cell_id}  {seconds:.1f} s{self._left()}",
            f"\n    {reason}" if reason else "",
        )
        self.console.print(line)
        self._tally[verdict] += 1
        counts = (f"[{STYLES.get(v, 'bold red')}]{count} {v}[/]" for v, count in self._tally.items())
        self._bar.update(self._task, completed=self._num_done, tally=" ".join(counts))

    def _left(self) -> str:
        """Estimate the time left from the cells so far; on a terminal the bar does."""
        num_left = self._num_cells - self._num_done
        if self.console.is_terminal or num_left <= 0 or not self._num_here:
            return ""
        left_s = (time.monotonic() - self._first_began) / self._num_here * num_left
        return f", ETA {timedelta(seconds=round(left_s))}"


class SearchBar:
    """Implements planner.search.SearchProgress as a context manager: a bar on a terminal, elsewhere a line
    for each stage."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or stderr()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[last]}", markup=False),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("estimating", total=None, last="")

    def __enter__(self) -> SearchBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def stage(self, text: str, num_trials: int) -> None:
        self._bar.reset(self._task, description=text, total=num_trials, last="")
        if not self.console.is_terminal:
            self.console.print(f"{text}: {num_trials} simulations", markup=False)

    def done(self, result: TrialResult) -> None:
        told = "outside of the tables" if result.refusal else f"{result.good_share:.0%} good"
        self._bar.update(self._task, advance=1, last=f"{result.trial.candidate.plan_id}: {told}"[:48])
