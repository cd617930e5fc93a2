"""The benchmark of a step's metadata: its steps are the steps it names, its line fits a line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "jobs" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import metadata as benchmark
finally:
    sys.path.remove(str(BENCHMARKS))


def test_every_table_has_a_row_for_every_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "NUM_REQUESTS", 64)
    monkeypatch.setattr(benchmark, "GROWTH", (8, 16))
    monkeypatch.setattr(sys, "argv", ["metadata.py", "--repeats", "1"])
    assert benchmark.main() == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    by_name = [row[:2] for row in cells if row[1] in ("decode", "mixed")]
    assert by_name == 2 * [[name, kind] for name in benchmark.MODELS for kind in ("decode", "mixed")]
    # Two of 64 requests are in prefill, one of them to its end; a request of more than a window has a row in
    # every group, and one in prefill in as many as it has chunks of this step.
    rows = {(row[0], row[1]): int(row[2]) for row in cells if len(row) == 8 and row[2].isdigit()}
    assert rows["full, window; fast both", "decode"] == 4 * 64
    assert rows["full, window; fast both", "mixed"] == 2 * 64 + 2 * 63
    assert 64 + 3 * 64 <= rows["full, 3 x chunk", "mixed"] <= 64 + 3 * 66
    orders = {row[0]: (int(row[1]), int(row[2])) for row in cells if row[0] in benchmark.ORDERS}
    assert orders == {
        "8 prompts of 1024, chunk 512": (8, 8 * 2),
        "8 prompts of 1024, chunk 64": (8, 8 * 16),
        "1 prompt of 8192, chunk 64": (1, 128),
        "8192 of a prompt of 16384, chunk 64": (0, 128),
        "128 decode, 8 prompts of 1024, chunk 64": (8 + 128, 8 * 16 + 128),
        "256 decode, chunk 512": (256, 256),
    }


def made_growth(last_doubling: float) -> benchmark.Growth:
    """Costs that grow linearly but for the last doubling, which takes so many times as much."""
    linear = [0.001 * n for n in benchmark.GROWTH]
    return benchmark.Growth((*linear[:-1], linear[-2] * last_doubling))


@pytest.mark.parametrize(
    ("totals", "last_doublings", "missed"),
    [
        ((0.1, 1.999), (2.0, 2.29), []),
        ((2.0, 0.1), (2.0,), ["2.000 ms, not under 2"]),
        ((0.1, 2.5, 3.0), (2.0,), ["2.500 ms, not under 2", "3.000 ms, not under 2"]),
        ((0.1,), (2.0, 2.31), ["power 1.21 in the last doubling, over 1.2"]),
        ((float("nan"),), (4.0,), ["nan ms, not under 2", "power 2.00 in the last doubling, over 1.2"]),
    ],
    ids=["just below", "at the limit", "over it", "steeper than linear", "both"],
)
def test_a_target_missed_is_told_and_fails_a_check(
    totals: tuple[float, ...],
    last_doublings: tuple[float, ...],
    missed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """2 ^ 1.2 = 2.297. On made-up numbers: what a machine takes is not judged here."""
    growths = [made_growth(factor) for factor in last_doublings]
    told = benchmark.missed_targets(totals, growths)
    assert [line.partition(": ")[2] for line in told] == missed
    assert all(line.startswith(tuple(benchmark.MODELS)) for line in told), "which row"
    monkeypatch.setattr(benchmark, "model_rows", lambda repeats: ([], list(totals)))
    monkeypatch.setattr(benchmark, "growth_rows", lambda repeats: ([], growths))
    monkeypatch.setattr(benchmark, "order_rows", lambda repeats: [])
    for arguments, status in (((), 0), (("--check",), int(bool(missed)))):
        monkeypatch.setattr(sys, "argv", ["metadata.py", *arguments])
        assert benchmark.main() == status
        assert capsys.readouterr().err.splitlines() == told


def test_the_line_is_that_of_the_costs() -> None:
    growth = benchmark.Growth(tuple(0.25 + 0.001 * n for n in benchmark.GROWTH))
    assert growth.line == pytest.approx((0.25, 0.001))
    assert growth.worst < 1e-9
    assert benchmark.Growth(tuple(float(n * n) for n in benchmark.GROWTH)).exponent == pytest.approx(2)
