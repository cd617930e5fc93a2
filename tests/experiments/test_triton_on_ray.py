"""`rayk run` with the Triton kernels on a real cluster; its workers run them in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayk import load
from tests.conftest import CheckpointFactory
from tests.house import ROOT
from tests.markers import interpreted, nixl, ray, slow

pytestmark = [ray, nixl, interpreted, pytest.mark.timeout(240), slow]


def test_tokens_are_right_and_the_results_name_the_interpreter(
    ray_address: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    spec = {
        "name": "triton",
        "model": str(checkpoint("qwen3", overrides={"num_hidden_layers": 2})),
        "device": "cpu",
        "prompts": {"random": {"count": 1, "input_tokens": [8], "seed": 0}},
        "sampling": {"max_tokens": 3, "ignore_eos": True},
        "matrix": {"prefill.tp": 2, "decode.tp": 1},
        "engine": {"attention_backend": "triton"},
        "checks": ["tokens", "kv_bytes"],
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "rayk.cli.main", "run", str(tmp_path / "spec.yaml")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run"), "--address", ray_address],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = load(tmp_path / "run").cells.to_dict("records")
    assert cell["verdict"] == "PASS"
    assert set(cell["checks_done"]) == {"tokens", "kv_bytes"}
    assert cell["num_kv_bytes_checked"] > 0
    for side in ("prefill", "decode"):
        assert cell[f"{side}.attention_implementation"] == "triton (interpreter)"
    assert "triton (interpreter)" in (tmp_path / "run" / "report.html").read_text()
