"""Runs a module of the tests in vLLM's own interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from rayk.vllm.arguments import ALONE, ON_CPUS
from tests.house import ROOT


def told_by(python: Path, module: str) -> list[dict[str, Any]]:
    """Return the JSON objects that a module prints, one a line; show what it says where it fails."""
    done = subprocess.run(
        [str(python), "-m", module],
        cwd=ROOT,
        env={**os.environ, **ALONE, **ON_CPUS, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
