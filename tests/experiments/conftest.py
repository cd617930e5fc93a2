"""Specs of small experiments, and what tests of them wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CheckpointFactory
from tests.pd import HANG_S


@pytest.fixture
def spec(checkpoint: CheckpointFactory) -> Callable[..., dict[str, Any]]:
    """`spec(matrix, **changes)`: a small experiment on the tiny Qwen3."""

    def make(matrix: Any, **changes: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "name": "test",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 3, "input_tokens": [5, 37, 300], "seed": 0}},
            "sampling": {"max_tokens": 12, "ignore_eos": True},
            "matrix": matrix,
            "deadlines": {"cell_s": 90.0, "request_s": 60.0, "transfer_s": 20.0},
        }
        return base | changes

    return make


def worker_processes() -> list[str]:
    """Command lines of the worker actors alive on this machine (a zombie has none)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if "ray::Worker" in title:
            found.append(title)
    return found


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = HANG_S) -> None:
    """Poll a condition. AssertionError when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)
