"""Where a run's time goes until its first request is sent: `startup` in environment.json.

The driver's steps end when it tells of the next one; the coordinator stamps its own. Both are on the driver's
host, whose monotonic clock they share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayk.types.progress import Progress

if TYPE_CHECKING:
    from rayk.actors.cell_outcome import CellOutcome

NS_PER_S = 1e9
PLAN, IMPORTS, MACHINE = "python, command line and plan", "imports", "torch, weights and machine"
SENT = "until the first request is sent"


class StartClock:
    """Implements types.progress.Progress over another one, and measures the steps before the first cell."""

    def __init__(self, progress: Progress, planned_ns: int) -> None:
        """`planned_ns`: when the plan was there, by the monotonic clock; imports have ended now."""
        self._progress = progress
        self._last_ns = process_start_ns()
        self._cpu_s = 0.0
        self._step = MACHINE
        self._stages: list[dict[str, Any]] = []
        self._is_over = False
        self._end(PLAN, planned_ns)
        self._end(IMPORTS, time.monotonic_ns())

    def plan(self, num_cells: int, num_finished: int) -> None:
        self._progress.plan(num_cells, num_finished)

    def phase(self, text: str) -> None:
        self._next(text)
        self._progress.phase(text)

    def warn(self, text: str) -> None:
        self._progress.warn(text)

    def begin(self, cell_id: str) -> None:
        self._next("")
        self._progress.begin(cell_id)

    def end(self, cell_id: str, verdict: str, reason: str) -> None:
        self._progress.end(cell_id, verdict, reason)

    def close(self, outcome: CellOutcome) -> dict[str, Any]:
        """Add what the coordinator did of the first cell. Returns stages in their order, each with its wall_s
        and the driver's cpu_s (null: the coordinator's stages); and of each engine its ranks' cpu_s: start of
        the process with its imports, load of the weights, transport."""
        for step, at_ns in outcome.moments.items():
            self._stage(step, at_ns, None)
        if outcome.requests:
            self._stage(SENT, min(row.arrival_ns for row in outcome.requests), None)
        total = sum(stage["wall_s"] for stage in self._stages)
        ranks = {name: facts["cpu_s"] for name, facts in outcome.facts.items() if "cpu_s" in facts}
        return {"first_request_s": round(total, 3), "stages": self._stages, "rank_cpu_s": ranks}

    def _next(self, step: str) -> None:
        if not self._is_over:
            self._end(self._step, time.monotonic_ns())
        self._step, self._is_over = step, not step

    def _end(self, step: str, at_ns: int) -> None:
        cpu_s = time.process_time()
        self._stage(step, at_ns, round(cpu_s - self._cpu_s, 3))
        self._cpu_s = cpu_s

    def _stage(self, step: str, at_ns: int, cpu_s: float | None) -> None:
        wall_s = max(0, at_ns - self._last_ns) / NS_PER_S
        self._stages.append({"stage": step, "wall_s": round(wall_s, 3), "cpu_s": cpu_s})
        self._last_ns = max(at_ns, self._last_ns)


def process_start_ns() -> int:
    """Return when this process began, by the monotonic clock, to a hundredth of a second (starttime of
    proc(5)). Where the system does not tell, it is now."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks = int(fields[19])
    except (OSError, ValueError, IndexError):
        return time.monotonic_ns()
    # A process's age is the same by both clocks, unless the machine slept meanwhile.
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.monotonic_ns() - age_ns
