"""A fault of vLLM 0.32.0 on CPUs, predicted to the bit: blocks of P and D with unlike numbers of tokens."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.house import ROOT
from tests.markers import needs_vllm


@needs_vllm
def test_blocks_of_unlike_sizes_are_put_together_as_no_kernel_reads_them(vllm_python: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(vllm_python), "-m", "tests.vllm.unlike_blocks"],
        cwd=ROOT,
        env={**environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (told,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert told["kernel_reads_itself"]
    assert not told["as_stored"]
    assert told["as_predicted"]
