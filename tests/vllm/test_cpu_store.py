"""The map of vLLM's CPU backend, learned from its own kernel, against what that kernel writes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.house import ROOT
from tests.markers import needs_vllm
from tests.vllm.cpu_store import BLOCK_SIZES, HEAD_SIZES


@needs_vllm
def test_what_the_cpu_kernel_stores_is_read_back_by_its_map(vllm_python: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(vllm_python), "-m", "tests.vllm.cpu_store"],
        cwd=ROOT,
        env={**environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) - 2 * len(HEAD_SIZES) * len(BLOCK_SIZES) in (0, 1)
    for case in cases:
        assert case["right"] == [True, True], case
        assert case["untouched"], case
        # K is transposed: the cache's shape, [heads, tokens, K and V], does not tell.
        size = case["block_size"]
        assert case["keys"] == f"from 0: head {2 * case['head_size'] * size}, element {size}, token 1"
