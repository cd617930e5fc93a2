"""A run is planned once, without torch, and the cluster decides what `device: auto` is. No Ray cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.experiments import planning
from rayk.specs import load_spec
from rayk.types.errors import CheckpointError, SpecError
from tests.conftest import CheckpointFactory


def spec(model: Path, **changes: Any) -> dict[str, Any]:
    prompts = {"random": {"count": 1, "input_tokens": [5]}}
    return {"model": str(model), "mode": "aggregated", "prompts": prompts, **changes}


def test_a_run_plans_each_cell_once(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cells that no model can run, so that no cluster starts."""
    numbers: dict[str, list[int]] = {"expand_matrix": [], "check_cells": []}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, calls in numbers.items():
        original = getattr(planning, name)

        def counted(*args: Any, original: Any = original, calls: list[int] = calls, **options: Any) -> Any:
            found = original(*args, **options)
            calls.append(len(getattr(found, "cells", found)))
            return found

        monkeypatch.setattr(planning, name, counted)
    path = tmp_path / "e.yaml"
    path.write_text(
        f"model: {checkpoint('qwen3')}\nmode: aggregated\nprompts: {{random: {{count: 1}}}}\n"
        "matrix: {prefill.tp: [3, 5]}\nexclude: [{prefill.tp: 7}]\n"
    )
    result = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert "UNSUPPORTED" in result.stdout
    assert "this exclude rule matches no cell" in result.stderr
    assert numbers == {"expand_matrix": [2], "check_cells": [2]}


def test_the_cluster_decides_what_auto_is(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "check_address", lambda _: None)
    engine = {"attention_backend": "triton"}
    loaded = load_spec(spec(checkpoint("qwen3"), engine=engine), source="e.yaml")
    monkeypatch.setattr("rayk.specs.devices.count_local_gpus", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def plan(address: str | None) -> planning.ExperimentPlan:
        return planning.plan_experiment(loaded, tmp_path / "out", address=address, tell=lambda _: None)

    refusal = "attention_backend: triton cannot run on device cpu"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SpecError, match=refusal):
        plan(None)
    elsewhere = plan("10.0.0.1:6379")
    assert [cell.prefill.device for cell, _ in elsewhere.cells] == ["auto"]
    assert [cell.prefill.device for cell, _ in elsewhere.on_device("cuda").cells] == ["cuda"]
    with pytest.raises(SpecError, match=refusal):
        elsewhere.on_device("cpu")


def test_weights_are_looked_at_where_engines_read_them(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(checkpoint("qwen3") / "config.json", model)
    engine: dict[str, Any] = {"costs": "c", "compute": "paced"}

    def plan(**changes: Any) -> planning.ExperimentPlan:
        loaded = load_spec(spec(model, engine=engine, **changes))
        return planning.plan_experiment(loaded, tmp_path / "out", tell=lambda _: None)

    assert plan().weights == ()
    with pytest.raises(CheckpointError, match="no .safetensors weights"):
        plan(matrix={"engine.compute": ["paced", "real"]})
    real = load_spec(spec(checkpoint("qwen3")))
    planned = planning.plan_experiment(real, tmp_path / "out", tell=lambda _: None)
    assert planned.weights == (str(checkpoint("qwen3")),)


def test_planning_is_free_of_torch_and_ray() -> None:
    loaded = "import rayk.experiments.planning, sys; print({'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"
