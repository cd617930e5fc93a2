"""Waits that last are told of, until they are over."""

from __future__ import annotations

import queue

import pytest
from rich.console import Console

from rayk.cli.progress import RunProgress
from rayk.types import waiting as waiting_module
from rayk.types.waiting import busy, get_within, waiting

LIMIT_S = 60.0


def test_a_wait_that_lasts_is_told_of_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "PAUSES_S", (0.01,))
    monkeypatch.setattr("os.getloadavg", lambda: (7.25, 1.0, 1.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    said: queue.Queue[str] = queue.Queue()
    with waiting("starting Ray", said.put):
        lines = [said.get(timeout=LIMIT_S) for _ in range(3)]
    assert lines == [
        f"starting Ray: {seconds} s so far; the machine is busy: load 7.2 on 2 cores" for seconds in (0, 0, 0)
    ]


def test_a_wait_that_is_over_is_not() -> None:
    said: list[str] = []
    with waiting("starting Ray", said.append):
        pass
    assert said == []


@pytest.mark.parametrize(("load", "told"), [(2.0, {}), (2.5, {"load": "2.5 on 2 cores"})])
def test_a_machine_is_busy_where_more_wants_to_run_than_may(
    monkeypatch: pytest.MonkeyPatch, load: float, told: dict[str, str]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert busy() == told


def test_a_runs_phases_are_told_of_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "PAUSES_S", (0.01,))
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    said: queue.Queue[str] = queue.Queue()

    class Lines(Console):
        def print(self, text: object = "", **_: object) -> None:  # type: ignore[override]
            said.put(str(text))

    with RunProgress(Lines(force_terminal=False)) as progress:
        for phase in ("starting Ray", "asking the reference"):
            progress.phase(phase)
            seen = said.get(timeout=LIMIT_S)
            while seen != f"{phase}: 0 s so far":
                seen = said.get(timeout=LIMIT_S)


def test_an_inbox_is_looked_into_before_it_is_waited_for() -> None:
    """The look takes the queue's lock, so that no time is subtracted from the wait (see get_within)."""
    calls: list[str] = []

    class Inbox(queue.SimpleQueue[int]):
        def get_nowait(self) -> int:
            calls.append("look")
            return super().get_nowait()

        def get(self, block: bool = True, timeout: float | None = None) -> int:
            calls.append("wait")
            return super().get(block, timeout)

    inbox = Inbox()
    for timeout_s in (0.001, 0.0):
        with pytest.raises(queue.Empty):
            get_within(inbox, timeout_s)
    inbox.put(7)
    assert get_within(inbox, 60.0) == 7
    assert calls == ["look", "wait", "look", "look"]
