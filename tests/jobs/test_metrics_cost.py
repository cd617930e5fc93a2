"""What metrics cost, counted: times and prices depend on the machine, calls do not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rayk.metrics import METRICS

SCRIPT = Path(__file__).parents[2] / "jobs" / "benchmarks" / "metrics_cost.py"
US_PER_CALL = dict.fromkeys(("inc", "set", "observe", "record"), 1.0)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("metrics_cost", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_whoever_gathers_tokens_makes_no_call_for_each(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the tokens at once: not one call more than a request's own."""
    calls = {}
    for num_tokens in (64, 128):
        monkeypatch.setattr(script, "NUM_TOKENS", num_tokens)
        row = script.measure_gatherer(8, 1.0, US_PER_CALL)
        calls[num_tokens] = round(sum(row.calls.values()) * num_tokens)
    num_borders = len(METRICS["rayk_itl_seconds"].buckets)
    assert calls[64] == calls[128] <= 8 * 6 + 1 + num_borders + 1 + 2
    assert calls[64] > 8 * 4, "every request's times"
