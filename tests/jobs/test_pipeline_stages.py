"""The engines that pipeline_stages compares, one with a rank in another process, give equal tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.benchmarks import pipeline_stages
from jobs.benchmarks.throughput import write_model
from tests.markers import thorough


@thorough
def test_engines_take_turns_and_have_equal_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_stages, "LENGTHS", (8, 16))
    write_model(tmp_path)
    pairs = pipeline_stages.measure(tmp_path, batch=2, num_tokens=3, num_rounds=2)
    assert len(pairs) == 2
    assert all(seconds > 0 for pair in pairs for seconds in pair)
