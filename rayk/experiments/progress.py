"""Report a run's progress as metrics, beside whoever else watches it."""

from __future__ import annotations

import threading

from rayk.metrics import Meter
from rayk.types.progress import Progress

BEAT_S = 0.5


class MeteredProgress:
    """Implements types.progress.Progress over another one. A context manager, whose thread repeats gauges.
    Cells that ended are counted by verdict."""

    def __init__(
        self, progress: Progress, meter: Meter, run: str, num_planned: int, num_finished: int
    ) -> None:
        self._run = run
        self._progress = progress
        self._meter = meter
        self._lock = threading.Lock()
        self._num_done = num_finished
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="progress", daemon=True)
        meter.set("rayk_cells_planned", num_planned, run=run)
        meter.set("rayk_cells_done", num_finished, run=run)

    def __enter__(self) -> MeteredProgress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._meter.flush()

    def plan(self, num_cells: int, num_finished: int) -> None:
        self._progress.plan(num_cells, num_finished)

    def phase(self, text: str) -> None:
        self._progress.phase(text)

    def warn(self, text: str) -> None:
        self._progress.warn(text)

    def begin(self, cell_id: str) -> None:
        self._progress.begin(cell_id)

    def end(self, cell_id: str, verdict: str, reason: str) -> None:
        with self._lock:
            self._num_done += 1
            self._meter.add("rayk_cells_total", run=self._run, verdict=verdict)
            self._meter.set("rayk_cells_done", self._num_done, run=self._run)
        self._progress.end(cell_id, verdict, reason)

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with self._lock:
                self._meter.flush()
