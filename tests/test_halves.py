"""`make test` fails when either half of the tests does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import halves

STUB = """#!/bin/sh
for last; do :; done
case "$last" in *"not ray") exit $PLAIN;; *"ray") echo said by ray; exit $RAY;; esac
"""


@pytest.mark.parametrize(
    ("plain", "with_ray", "status"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (0, 5, 0), (5, 0, 0), (5, 1, 1), (5, 5, 5), (2, 1, 2)],
)
def test_the_worse_status_counts(
    plain: int,
    with_ray: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stub))
    monkeypatch.setenv("PLAIN", str(plain))
    monkeypatch.setenv("RAY", str(with_ray))
    assert halves.halves([]) == status
    assert capfd.readouterr().out == "said by ray\n"
