"""Wait for a quiet machine before each cell of a run, and note beside which cells others computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayk.cli.progress import RunProgress

BUSY_SHARE = 0.2  # of all cores: what others may use
PROBE_S = 1.0


def busy_share(seconds: float = PROBE_S, sleep: Callable[[float], object] = time.sleep) -> float:
    """Measure the share of all cores that anybody uses for a while, in which the caller waits."""
    before = _cpu_times()
    sleep(seconds)
    total, idle = (now - then for now, then in zip(_cpu_times(), before, strict=True))
    return 1 - idle / total if total else 0.0


def _cpu_times() -> tuple[int, int]:
    """Return all and idle time of all cores so far, in ticks."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[:8]), fields[3] + fields[4]


@dataclass
class QuietProgress:
    """Implements types.progress.Progress, and is a context manager: probes the machine before and after each
    cell, while the run has nothing to do, and waits for `patience_s` at most."""

    progress: RunProgress
    patience_s: float
    probe: Callable[[], float] = busy_share
    clock: Callable[[], float] = time.monotonic
    before: dict[str, float] = field(default_factory=dict)
    """Cell -> busy share when it began."""
    after: dict[str, float] = field(default_factory=dict)
    _last: str = ""

    def __enter__(self) -> QuietProgress:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._last:
            self.after[self._last] = self.probe()
        self.progress.__exit__(*error)

    def plan(self, num_cells: int, num_finished: int) -> None:
        self.progress.plan(num_cells, num_finished)

    def phase(self, text: str) -> None:
        self.progress.phase(text)

    def warn(self, text: str) -> None:
        self.progress.warn(text)

    def begin(self, cell_id: str) -> None:
        until = self.clock() + self.patience_s
        share = self.probe()
        if self._last:
            self.after[self._last] = share
        while share > BUSY_SHARE and self.clock() < until:
            share = self.probe()
        self.before[cell_id], self._last = share, cell_id
        self.progress.begin(cell_id)

    def end(self, cell_id: str, verdict: str, reason: str) -> None:
        self.progress.end(cell_id, verdict, reason)

    def busy(self) -> dict[str, float]:
        """Return the cells beside which the machine was busy, and how busy at the most."""
        worst = {cell: max(share, self.after.get(cell, 0.0)) for cell, share in self.before.items()}
        return {cell: share for cell, share in worst.items() if share > BUSY_SHARE}
