"""jobs/hetero_tp.py is `rayk run`, as a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).parents[2] / "jobs" / "hetero_tp.py"


def test_the_jobs_exit_status_is_the_runs(tmp_path: Path) -> None:
    spec = tmp_path / "bad.yaml"
    spec.write_text("model: m\nprompts: {random: {}}\nmatrx: {}\n")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, str(JOB), "--spec", str(spec)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "bad.yaml:3: unknown key 'matrx'" in done.stderr
    assert "did you mean 'matrix'?" in done.stderr
    assert list(tmp_path.iterdir()) == [spec]
