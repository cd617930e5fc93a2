"""Whole cells on vLLM's own engines pass every check of rayk's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk.experiments import Experiment
from tests.conftest import CheckpointFactory
from tests.markers import needs_vllm, ray

pytestmark = [needs_vllm, ray, pytest.mark.timeout(1800)]


def test_cells_of_vllm_pass_the_checks_of_rayks_own(
    ray_address: str, vllm_python: Path, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    spec: dict[str, Any] = {
        "model": str(checkpoint("qwen3", overrides={"head_dim": 32})),
        "device": "cpu",
        "prompts": {"random": {"count": 3, "input_tokens": [5, 37, 300], "seed": 0}},
        "sampling": {"max_tokens": 6, "ignore_eos": True, "logprobs": 2},
        "engine": {"kind": "vllm", "python": str(vllm_python)},
        "prefill": {"block_size": 32},
        "decode": {"block_size": 32},
        "checks": ["tokens", "logprobs", "kv_bytes", "kv_values"],
        "matrix": {"mode": ["aggregated", "disaggregated"]},
        "deadlines": {"cell_s": 300.0, "request_s": 200.0, "transfer_s": 60.0},
    }
    result = Experiment(spec).run(tmp_path / "run", address=ray_address)
    cells = result.cells.set_index("mode")
    told = {mode: (row["verdict"], row["reason"]) for mode, row in cells.iterrows()}
    assert told == {"aggregated": ("PASS", ""), "disaggregated": ("PASS", "")}
    assert set(cells.loc["disaggregated", "checks_done"]) == {"tokens", "logprobs", "kv_bytes", "kv_values"}
    assert set(cells.loc["aggregated", "checks_done"]) == {"tokens", "logprobs", "kv_values"}
    handed_on = result.requests[result.requests["kv_path"] == "remote"]
    assert len(handed_on) == 3
