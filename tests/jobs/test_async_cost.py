"""The loops that async_cost compares take the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.benchmarks import async_cost
from jobs.benchmarks.throughput import write_model
from tests.markers import thorough


class _Contrary(async_cost.PlainLoop):
    """Prefers the least likely token at a prompt's end, so that its requests have others."""

    def turn(self) -> bool:
        last = self._rank.decoder.logits
        self._rank.decoder.logits = lambda hidden: -last(hidden)  # type: ignore[method-assign]
        try:
            return super().turn()
        finally:
            self._rank.decoder.logits = last  # type: ignore[method-assign]


@thorough
def test_loops_have_equal_tokens_and_another_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)
    found = async_cost.measure(tmp_path, batch=2, num_rounds=2, num_steps=3)
    assert {name: len(times) for name, times in found.items()} == {"none": 2, "off": 2, "on": 2}
    assert all(us > 0 for times in found.values() for us in times)
    monkeypatch.setitem(async_cost.LOOPS, "none", ("off", _Contrary))
    with pytest.raises(AssertionError, match="other tokens"):
        async_cost.measure(tmp_path, batch=2, num_rounds=1, num_steps=3)
