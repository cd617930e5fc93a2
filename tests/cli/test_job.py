"""jobs/hetero_tp.py is `rayk run`, as a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayk import load
from tests.conftest import CheckpointFactory
from tests.experiments.conftest import wait_until, worker_processes
from tests.markers import nixl, ray, thorough

JOB = Path(__file__).parents[2] / "jobs" / "hetero_tp.py"
SPEC = JOB.with_suffix(".yaml")


def run_job(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, str(JOB), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=150,
        check=False,
    )


def test_bad_input_exits_2_and_leaves_nothing(tmp_path: Path) -> None:
    spec = tmp_path / "bad.yaml"
    spec.write_text("model: m\nprompts: {random: {}}\nmatrx: {}\n")
    done = run_job(tmp_path, "--spec", spec)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "bad.yaml:3: unknown key 'matrx'" in done.stderr
    assert "did you mean 'matrix'?" in done.stderr
    assert list(tmp_path.iterdir()) == [spec]


@thorough
@ray
@nixl
def test_the_jobs_exit_status_is_the_runs_on_a_cluster_of_its_own(
    tmp_path: Path, checkpoint: CheckpointFactory
) -> None:
    spec = {
        "model": str(checkpoint("qwen3")),
        "device": "cpu",
        "prompts": {"random": {"count": 1, "input_tokens": [37]}},
        "sampling": {"max_tokens": 4, "ignore_eos": True},
        "matrix": {"faults": [[], [{"kind": "flip_bit", "expect": "PASS"}]]},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    done = run_job(tmp_path, "--spec", "spec.yaml", "--out", "run")
    assert done.returncode == 1, done.stderr
    assert load(tmp_path / "run").cells["verdict"].tolist() == ["PASS", "KV_MISMATCH"]
    assert "1 of 2 PASS, 1 KV_MISMATCH" in done.stdout
    assert "report: run/report.html" in done.stderr
    wait_until(lambda: not worker_processes(), "the cluster ends with the run")


@thorough
@ray
@nixl
@pytest.mark.timeout(600)
def test_all_cells_of_make_experiment_pass(ray_address: str, tmp_path: Path) -> None:
    """The README's first command, on the tests' cluster: it writes its checkpoint and prints the table."""
    command = [sys.executable, "-m", "rayk.cli.main", "run", str(SPEC), "--out", "run"]
    command += ["--address", ray_address, "--set", "device=cpu"]  # the cluster's GPUs are names
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=570, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 20 PASS" in done.stdout
    cells = load(tmp_path / "run").cells
    assert cells["verdict"].tolist() == ["PASS"] * 20
    hand_overs = cells[cells["mode"] == "disaggregated"]
    assert {frozenset(c) for c in hand_overs["checks_done"]} == {
        frozenset(("tokens", "kv_bytes", "kv_values"))
    }
    assert (tmp_path / "checkpoints" / "qwen3-tiny" / "config.json").exists()
