"""A loop that stands still is found in the log, with the line it stands at; one that goes on is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import time
from rayk.actors.stack_watch import StackWatch

def stands_still():
    time.sleep(2.0)

def goes_on():
    for _ in range(20):
        watch.tick()
        time.sleep(0.1)

watch = StackWatch(still_s=1.0, rearm_s=0.05)
watch.tick()
{loop}()
watch.end()
time.sleep({after})
"""


@pytest.mark.parametrize(("loop", "after"), [("stands_still", 0.0), ("goes_on", 0.0), ("goes_on", 1.5)])
def test_where_a_loop_stands_is_written(loop: str, after: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(loop=loop, after=after)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == ""
    if loop == "goes_on":
        assert done.stderr == ""
    else:
        assert "in stands_still" in done.stderr
        assert done.stderr.startswith("Timeout (0:00:01)!")
