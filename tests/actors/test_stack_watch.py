"""A loop that stands still is found in the log, with the line it stands at; one that goes on is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayk.actors import stack_watch
from rayk.actors.stack_watch import StackWatch

SCRIPT = """
import os, time
from rayk.actors.stack_watch import StackWatch

def stands_still():
    while not os.fstat(2).st_size:
        time.sleep(0.01)

StackWatch(still_s=1.0).tick()
stands_still()
"""


def test_where_a_loop_stands_is_written(tmp_path: Path) -> None:
    """Until it is: however late that thread gets its turn."""
    with (tmp_path / "stderr").open("w+b") as stderr:
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, check=True, timeout=120)
    assert done.stdout == b""
    text = (tmp_path / "stderr").read_text()
    assert "in stands_still" in text
    assert text.startswith("Timeout (0:00:01)!")


def test_a_loop_that_goes_on_is_put_off_in_time_and_let_go_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, armed_s, num_cancelled = 0.0, list[float](), 0

    def arm(still_s: float, *, file: int) -> None:
        assert (still_s, file) == (1.0, 2)
        armed_s.append(now_s)

    def cancel() -> None:
        nonlocal num_cancelled
        num_cancelled += 1

    found = SimpleNamespace(dump_traceback_later=arm, cancel_dump_traceback_later=cancel)
    monkeypatch.setattr(stack_watch, "faulthandler", found)
    monkeypatch.setattr(stack_watch, "time", SimpleNamespace(monotonic=lambda: now_s))
    watch = StackWatch(still_s=1.0, rearm_s=0.25)
    for tick in range(20):
        now_s = tick / 8
        watch.tick()
    assert armed_s == [0.25 * i for i in range(10)], "not at every turn, and before it is over"
    assert num_cancelled == 0
    watch.end()
    assert num_cancelled == 1
