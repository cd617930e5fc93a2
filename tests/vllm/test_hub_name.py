"""vLLM's engines on a model by its name on the hub: rayk fetches it, vLLM reads a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayk import load
from tests.conftest import CheckpointFactory
from tests.local_hub import NAME, PINNED, WEIGHTS, hub_environment, local_hub, with_tiny_model
from tests.markers import needs_vllm, ray

pytestmark = [needs_vllm, ray, pytest.mark.timeout(1800)]


def test_vllms_engines_take_names(vllm_python: Path, checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    spec = {
        "model": NAME,
        "device": "cpu",
        "prompts": {"random": {"count": 2, "input_tokens": [5, 37], "seed": 0}},
        "sampling": {"max_tokens": 4, "ignore_eos": True},
        "engine": {"kind": "vllm", "python": str(vllm_python)},
        "prefill": {"block_size": 32},
        "decode": {"block_size": 32},
        "matrix": {"mode": ["disaggregated"]},
        "deadlines": {"cell_s": 300.0, "request_s": 200.0, "transfer_s": 60.0},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    with local_hub() as hub:
        with_tiny_model(hub, checkpoint("qwen3", overrides={"head_dim": 32}), tmp_path / "source")
        done = subprocess.run(
            [sys.executable, "-m", "rayk.cli.main", "run", "spec.yaml", "--out", "run"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | hub_environment(hub, tmp_path / "home"),
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = load(tmp_path / "run").cells.to_dict("records")
    assert (cell["verdict"], cell["reason"]) == ("PASS", "")
    assert yaml.safe_load((tmp_path / "run" / "spec.yaml").read_text())["model"] == PINNED
    assert hub.fetched().count(WEIGHTS) == 1
    asked = {path for _, path in hub.requests}
    assert all(path.startswith((f"/api/models/{NAME}/", f"/{NAME}/resolve/")) for path in asked), asked
