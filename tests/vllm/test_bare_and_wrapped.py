"""A hybrid model under vLLM's NixlConnector, bare and proven: nothing of the engine is another for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.vllm.arguments import ALONE, ON_CPUS
from tests.house import ROOT
from tests.markers import needs_vllm, slow
from tests.pd import HANG_S
from tests.vllm.run_engine import RESULT

pytestmark = [needs_vllm, slow]
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PROVEN = {
    **NIXL,
    "kv_connector_module_path": "rayk.vllm.proving",
    "kv_connector_extra_config": {"secret": "a secret of twenty letters"},
}


def run(python: Path, model: Path, config: dict[str, Any]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of one engine, of which no process is left."""
    left = {k: v for k, v in os.environ.items() if k != "VLLM_SSM_CONV_STATE_LAYOUT"}
    engine = subprocess.Popen(
        [python, "-m", "tests.vllm.run_engine", model, json.dumps(config)],
        cwd=ROOT,
        env={**left, **ALONE, **ON_CPUS, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = engine.communicate(timeout=HANG_S)
        return engine.returncode, output, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()


@pytest.mark.timeout(3 * HANG_S)
def test_a_hybrid_lies_in_memory_and_answers_alike(vllm_python: Path, tmp_path: Path) -> None:
    model = tmp_path / "falcon_h1"
    made = CliRunner().invoke(app, ["checkpoint", "falcon_h1", str(model), "--set", "hidden_size=256"])
    assert made.exit_code == 0, made.output
    found = []
    for config in (NIXL, PROVEN):
        status, output, errors = run(vllm_python, model, config)
        assert status == 0, errors[-4000:]
        (line,) = (line for line in output.splitlines() if line.startswith(RESULT))
        found.append(json.loads(line.removeprefix(RESULT)))
    bare, proven = found
    assert bare["layouts"][0]["conv"] == "DS"
    assert any(len(caches) == 2 for caches in bare["layouts"][0]["caches"].values()), "it keeps states"
    assert proven == bare
