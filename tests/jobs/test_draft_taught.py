"""jobs/draft_taught.py: a tiny model learns from pages, in a folder of its own."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rayk.models.families import load_config
from rayk.types.errors import UserError
from tests.conftest import ROOT, CheckpointFactory


@pytest.fixture
def job() -> Any:
    return importlib.import_module("jobs.draft_taught")


def test_a_model_learns_and_its_folder_is_a_checkpoint(
    job: Any, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """Without the promise of the drawn weights; a second run replaces it."""
    folder, target = checkpoint("llama"), tmp_path / "taught"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    kept: list[bytes] = []
    for _ in range(2):
        losses = job.taught(folder, target, [ROOT / "LICENSE"], minutes=1.0, updates=10, seed=3)
        assert len(losses) == 10
        assert sum(losses[-3:]) < sum(losses[:3])
        kept.append((target / "model.safetensors").read_bytes())
    assert kept[0] == kept[1] != before["model.safetensors"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not (target / "rayk_checkpoint.json").exists()
    assert json.loads((target / "taught.json").read_text())["losses"] == losses
    assert load_config(target) == load_config(folder)
    AutoModelForCausalLM.from_pretrained(target)


def test_what_is_no_taught_model_is_left_alone(
    job: Any, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    folder, few = checkpoint("llama"), tmp_path / "few"
    few.write_text("too little")
    with pytest.raises(UserError, match="tokens of text"):
        job.taught(folder, tmp_path / "taught", [few], minutes=1.0, updates=1, seed=0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(UserError):
        job.taught(folder, tmp_path / "other", [ROOT / "LICENSE"], minutes=1.0, updates=1, seed=0)
    assert (tmp_path / "other" / "config.json").read_text() == "{}"
