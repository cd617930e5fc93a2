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
  *"a.py::one"*) echo "$AGAIN in 1s"; exit $AGAIN_STATUS;;
  *) fold=${*#*cache_dir=}; fold=${fold%% *}; mkdir -p $fold/v/cache; echo "$LAST" > $fold/v/cache/lastfailed
     echo "1 failed, 3 passed in 1s"; exit $RAY;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stub))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("LAST", '{"a.py::one": true}')
    monkeypatch.setenv("PLAIN", "0")
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


@pytest.mark.parametrize(
    ("with_ray", "again", "again_status", "status"),
    [
        (1, "1 passed", 0, 0),
        (1, "1 failed", 1, 1),
        (1, "1 skipped", 0, 1),
        (1, "no tests ran", 4, 1),
        (2, "1 passed", 0, 2),
    ],
)
def test_what_failed_is_run_again_alone(
    with_ray: int,
    again: str,
    again_status: int,
    status: int,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY", str(with_ray))
    monkeypatch.setenv("AGAIN", again)
    monkeypatch.setenv("AGAIN_STATUS", str(again_status))
    monkeypatch.setattr(lanes, "plain_parts", lambda: [Part(("a",), "quick and not ray")])
    assert lanes.main(["-q"]) == status
    called = calls.read_text().splitlines()
    assert sum("a.py::one" in line for line in called) == (with_ray == 1)
    last = capsys.readouterr().out.splitlines()[-1]
    if status == 0:
        assert last == "failed once, and passed when run again alone: a.py::one"
    else:
        assert last.startswith("in all: ")
        assert "1 failed" in last


def test_where_much_failed_nothing_is_run_again(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY", "1")
    names = ", ".join(f'"a.py::one[{i}]": true' for i in range(lanes.MOST_AGAIN + 1))
    monkeypatch.setenv("LAST", f"{{{names}}}")
    monkeypatch.setattr(lanes, "plain_parts", lambda: [Part(("a",), "quick and not ray")])
    assert lanes.main(["-q"]) == 1
    assert len(calls.read_text().splitlines()) == 2


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
