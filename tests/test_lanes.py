"""`make test` runs every test once, and fails when any part does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lanes
from tests.lanes import Part, plain_parts, run_lanes

STUB = """#!/bin/sh
for last; do :; done
echo "$@" >> "$CALLS"
case "$*" in
  *"not ray"*) echo "2 passed, 1 deselected in 0.1s"; case "$*" in *bad*) exit $PLAIN;; esac; exit 0;;
  *) echo "1 failed, 3 passed in 1s"; exit $RAY;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stub))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.mark.parametrize(
    ("plain", "with_ray", "status"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (0, 5, 0), (5, 0, 0), (5, 1, 1), (2, 1, 2), (-11, 0, 139)],
)
def test_the_worst_status_counts(
    plain: int, with_ray: int, status: int, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN", str(plain % 256 if plain >= 0 else 139))
    monkeypatch.setenv("RAY", str(with_ray))
    parts = [Part((name,), "quick and not ray") for name in ("a", "bad", "c", "d")]
    outcome = run_lanes(["-q"], parts)
    assert outcome.status == status
    assert outcome.counts == {"passed": 11, "failed": 1, "deselected": 4}
    called = calls.read_text().splitlines()
    assert len(called) == 5
    assert sum("not ray" not in line for line in called) == 1
    assert sorted(line.split()[3] for line in called if "not ray" in line) == ["a", "bad", "c", "d"]


def test_nothing_at_all_is_told() -> None:
    outcome = lanes.Outcome()
    outcome.add(lanes.NO_TESTS, "5 deselected in 0.1s")
    assert outcome.status == lanes.NO_TESTS


def test_parts_hold_every_test_file_once() -> None:
    held = [path for part in plain_parts() for path in part.paths]
    assert len(held) == len(set(held))
    for file in lanes.TESTS.rglob("test_*.py"):
        assert sum(file == Path(p) or Path(p) in file.parents for p in held) == 1, file
    assert [Path(p).name for p in held[: len(lanes.FIRST)]] == list(lanes.FIRST)
