"""A run's progress in metrics: cells by verdict, and gauges that stay while nothing happens."""

from __future__ import annotations

from rayk.experiments.progress import MeteredProgress
from rayk.metrics import Meter
from tests.metrics.recording import Recorder
from tests.pd import wait_until


class Watcher:
    """Implements types.progress.Progress."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def plan(self, num_cells: int, num_finished: int) -> None:
        self.told.append(("plan", num_cells, num_finished))

    def phase(self, text: str) -> None:
        self.told.append(("phase", text))

    def warn(self, text: str) -> None:
        self.told.append(("warn", text))

    def begin(self, cell_id: str) -> None:
        self.told.append(("begin", cell_id))

    def end(self, cell_id: str, verdict: str, reason: str) -> None:
        self.told.append(("end", cell_id, verdict, reason))


def test_cells_are_counted_by_verdict_and_told_on() -> None:
    recorder, watcher = Recorder(), Watcher()
    verdicts = ["PASS", "KV_MISMATCH", "PASS", "UNSUPPORTED"]
    with MeteredProgress(watcher, Meter(recorder), "r1", 9, 3) as progress:
        progress.phase("starting")
        progress.warn("odd")
        for i, verdict in enumerate(verdicts):
            progress.begin(f"c{i}")
            progress.end(f"c{i}", verdict, "why")
        assert recorder.known == {}
    assert {v: recorder.sum("rayk_cells_total", run="r1", verdict=v) for v in verdicts} == {
        "PASS": 2,
        "KV_MISMATCH": 1,
        "UNSUPPORTED": 1,
    }
    assert recorder.gauge("rayk_cells_planned", run="r1") == 9
    assert recorder.gauge("rayk_cells_done") == 3 + 4
    assert watcher.told[:2] == [("phase", "starting"), ("warn", "odd")]
    assert watcher.told[2:4] == [("begin", "c0"), ("end", "c0", "PASS", "why")]


def test_gauges_are_told_again_though_a_cell_takes_long() -> None:
    recorder = Recorder()
    with MeteredProgress(Watcher(), Meter(recorder), "r1", 2, 0):
        wait_until(lambda: recorder.num_calls >= 6)
    assert recorder.gauge("rayk_cells_planned") == 2


def test_two_runs_at_once_are_told_apart() -> None:
    recorder = Recorder()
    with (
        MeteredProgress(Watcher(), Meter(recorder), "r1", 2, 0) as one,
        MeteredProgress(Watcher(), Meter(recorder), "r2", 5, 0),
    ):
        one.end("c0", "PASS", "")
    assert [recorder.gauge("rayk_cells_planned", run=run) for run in ("r1", "r2")] == [2, 5]
    assert [recorder.gauge("rayk_cells_done", run=run) for run in ("r1", "r2")] == [1, 0]
