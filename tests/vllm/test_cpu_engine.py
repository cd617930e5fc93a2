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
from tests.markers import needs_vllm, slow
from tests.vllm.cpu_engine import ENVIRONMENT, prompt_ids

TOKENS = 300
"""More than two blocks of vLLM's default size, and no whole number of them."""


@needs_vllm
@pytest.mark.parametrize(
    ("family", "options", "tp_size"),
    [
        ("falcon_h1", {"hidden_size": 256, "mamba_n_groups": 1}, 1),
        pytest.param("falcon_h1", {"hidden_size": 256, "mamba_n_groups": 1}, 2, marks=slow),
        pytest.param("falcon_h1", {"hidden_size": 256, "mamba_n_groups": 2}, 2, marks=slow),
        pytest.param("qwen3", {"head_dim": 32}, 1, marks=slow),
        pytest.param("gemma3", {"head_dim": 32}, 1, marks=slow),
        pytest.param("mistral", {"head_dim": 32}, 1, marks=slow),
    ],
)
def test_a_real_engines_rows_are_those_of_transformers(
    family: str,
    options: dict[str, Any],
    tp_size: int,
    checkpoint: Any,
    reference: Any,
    vllm_python: Path,
    tmp_path: Path,
) -> None:
    """Of every unit, on each rank that has it; of a window, the rows that are seen again."""
    path = checkpoint(family, overrides=options)
    out = tmp_path / "rows.npz"
    command = [
        str(vllm_python),
        "-m",
        "tests.vllm.cpu_engine",
        str(path),
        str(out),
        str(TOKENS),
        str(tp_size),
    ]
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
    names = [name.partition(".")[2] for name in rows.files]
    assert set(names) == set(expected)
    assert tp_size == 1 or not all(names.count(name) == tp_size for name in names)
    for name in rows.files:
        found = torch.from_numpy(rows[name]).view(torch.float32).numpy()
        values = expected[name.partition(".")[2]][-len(found) :]
        # The values are of order one: anything but float32's noise is another row.
        np.testing.assert_allclose(found, values, rtol=1e-3, atol=1e-4, err_msg=name)
