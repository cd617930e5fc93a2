"""The Triton kernels compile for a GPU that is not here, inside its limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES_SM90 = 232_448
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_kernels_compile_for_sm90_without_spills(tmp_path: Path) -> None:
    """In its own process: Triton decides at import whether it interprets or compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_ahead.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 12, "2 dtypes x 2 head sizes x (decode, mixed, store)"
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES_SM90, row
        assert row["stack_bytes"] == row["local_bytes"] == 0, f"spills: {row}"
