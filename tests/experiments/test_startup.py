"""Where a run's time goes until its first request: stages on one clock that leave nothing out."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments import startup
from rayk.experiments.run import Quiet
from rayk.experiments.startup import StartClock
from rayk.types.rows import RequestRow

S = 1_000_000_000


def test_a_process_began_when_the_system_says() -> None:
    script = (
        "from rayk.experiments.startup import process_start_ns as f; import time; time.sleep(0.3); print(f())"
    )
    before = time.monotonic_ns()
    told = int(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    )
    assert before - S // 20 < told < time.monotonic_ns() - 3 * S // 10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The time in s; processor time is a tenth of it."""
    now = {"s": 0}
    monkeypatch.setattr(startup.time, "monotonic_ns", lambda: now["s"] * S)
    monkeypatch.setattr(startup.time, "process_time", lambda: now["s"] / 10)
    monkeypatch.setattr(startup, "process_start_ns", lambda: 0)
    return now


def test_stages_follow_one_another_until_the_first_request(clock: dict[str, int]) -> None:
    clock["s"] = 3
    watched = StartClock(Quiet(), 2 * S)
    for at, step in (4, watched.phase), (9, watched.phase), (10, watched.begin):
        clock["s"] = at
        step(f"since {at}")
    clock["s"] = 30
    watched.begin("the next cell")  # which is no part of the start
    rows: list[Any] = [
        RequestRow(
            cell_id="c",
            repeat=0,
            request_id=str(at),
            prompt_index=0,
            prompt_token_ids=[1],
            output_token_ids=[],
            finish_reason="length",
            arrival_ns=at * S,
            token_times_ns=[],
        )
        for at in (21, 19)
    ]
    facts = {"prefill0": {"cpu_s": [{"start": 1.0, "load": 2.0, "transport": 0.5}]}, "vllm": {}}
    outcome = CellOutcome(requests=rows, facts=facts, moments={"workers are there": 12 * S, "formed": 18 * S})
    found = watched.close(outcome)
    assert [(stage["stage"], stage["wall_s"], stage["cpu_s"]) for stage in found["stages"]] == [
        (startup.PLAN, 2, 0.3),
        (startup.IMPORTS, 1, 0),
        (startup.MACHINE, 1, 0.1),
        ("since 4", 5, 0.5),
        ("since 9", 1, 0.1),
        ("workers are there", 2, None),
        ("formed", 6, None),
        (startup.SENT, 1, None),
    ]
    assert found["first_request_s"] == 19
    assert found["rank_cpu_s"] == {"prefill0": [{"start": 1.0, "load": 2.0, "transport": 0.5}]}


def test_a_cell_without_requests_tells_how_far_it_came(clock: dict[str, int]) -> None:
    watched = StartClock(Quiet(), S)
    clock["s"] = 5
    watched.begin("c")
    found = watched.close(CellOutcome(moments={"workers are there": 8 * S}))
    assert found["first_request_s"] == 8
    assert found["stages"][-1]["stage"] == "workers are there"
