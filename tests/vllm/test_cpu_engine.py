"""What is read of a real vLLM engine's caches is what transformers caches of the same prompt."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.house import ROOT
from tests.markers import needs_vllm, slow, thorough
from tests.vllm.cpu_engine import ENVIRONMENT, prompt_ids

TOKENS = 300
"""More than two blocks of vLLM's default size, and no whole number of them."""


@needs_vllm
@thorough
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("falcon_h1", {"hidden_size": 256, "mamba_n_groups": 1}),
        pytest.param("falcon_h1", {"hidden_size": 256, "mamba_n_groups": 2}, marks=slow),
        pytest.param("qwen3", {"head_dim": 32}, marks=slow),
    ],
    ids=["falcon_h1", "falcon_h1-2-groups", "qwen3"],
)
def test_a_real_engines_rows_are_those_of_transformers(
    family: str,
    options: dict[str, Any],
    checkpoint: Any,
    reference: Any,
    vllm_python: Path,
    tmp_path: Path,
) -> None:
    path = checkpoint(family, overrides=options)
    out = tmp_path / "rows.npz"
    command = [str(vllm_python), "-m", "tests.vllm.cpu_engine", str(path), str(out), str(TOKENS)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    rows = np.load(out)
    expected = {
        f"{layer}.{field}.{unit}": values[unit].numpy()
        for layer, fields in enumerate(reference(path).caches(prompt_ids(TOKENS)))
        for field, values in fields.items()
        for unit in range(len(values))
    }
    assert set(rows.files) == set(expected)
    for name, values in expected.items():
        found = torch.from_numpy(rows[name]).view(torch.float32).numpy()
        # The values are of order one: anything but float32's noise is another row.
        np.testing.assert_allclose(found, values, rtol=1e-3, atol=1e-4, err_msg=name)
