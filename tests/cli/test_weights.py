"""Weights of another config.json are refused before Ray starts; those of no use are told in a line."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.serve.llm import LLM
from rayk.types.errors import CheckpointError
from tests.conftest import CheckpointFactory
from tests.specs.models import spec

UP = "model.layers.1.mlp.up_proj.weight"


class Started(Exception):
    """Ray was asked for."""


@pytest.fixture
def model(tmp_path: Path, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of one's own; and nothing gets as far as a cluster."""

    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr("rayk.actors.launch.connect", start)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))


def change(model: Path, **tensors: torch.Tensor | None) -> None:
    file = model / "model.safetensors"
    changed: dict[str, torch.Tensor | None] = load_file(file) | tensors
    save_file({n: t for n, t in changed.items() if t is not None}, file)


def run(model: Path) -> str:
    path = model.parent / "e.yaml"
    path.write_text(yaml.safe_dump(spec(model=str(model))))
    return told("run", str(path), "--out", str(model.parent / "out"))


def serve(model: Path) -> str:
    return told("serve", str(model), "--port", "0")


def told(*command: str) -> str:
    result = CliRunner().invoke(app, list(command))
    if not isinstance(result.exception, Started):
        assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


def llm(model: Path) -> str:
    """Its log, or its error."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rayk").addHandler(handler)
    try:
        LLM(model)
    except CheckpointError as error:
        lines.append(str(error))
    except Started:
        pass
    finally:
        logging.getLogger("rayk").removeHandler(handler)
    return "\n".join(lines)


@pytest.mark.parametrize("command", [run, serve, llm])
def test_weights_of_another_config(model: Path, command: Callable[[Path], str]) -> None:
    assert "tensor" not in command(model)
    change(model, **{UP: None})
    assert f"tensor {UP} is missing" in command(model)
    change(model, **{UP: torch.zeros(3, 5)})
    assert f"tensor {UP} has shape [3, 5], config.json asks for [" in command(model)


@pytest.mark.parametrize("command", [run, serve, llm])
def test_tensors_of_no_use_are_one_line(model: Path, command: Callable[[Path], str]) -> None:
    change(model, **{f"{part}.{i}": torch.zeros(1) for part in ("mtp", "vision_tower") for i in range(20)})
    lines = [line for line in command(model).splitlines() if "tensor" in line]
    assert len(lines) == 1
    assert lines[0].endswith(f"{model}: 40 tensors not used: mtp.*, vision_tower.*")


def test_the_package_of_the_reference_is_not_needed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds to import is not in the way of a refusal."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    change(model, **{UP: None})
    assert "is missing" in run(model)
