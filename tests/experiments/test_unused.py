"""The note of tensors that engines leave out, kept on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayk.experiments.unused import note_unused
from rayk.models import unused
from rayk.models.families import load_config
from rayk.oracle.cache import AnswerStore
from rayk.types.errors import CheckpointError
from tests.models.tiny import write_checkpoint

SECOND = """\
import sys
from pathlib import Path
from rayk.experiments.judge import CellJudge
from rayk.experiments.unused import note_unused
from rayk.models.families import load_config
from rayk.oracle.cache import AnswerStore

folder, notes = sys.argv[1:]
print(note_unused(folder, load_config(Path(folder)), AnswerStore(Path(notes))), "torch" in sys.modules)
"""


def test_a_second_run_knows_without_torch_what_the_first_one_found(tmp_path: Path) -> None:
    model, notes = tmp_path / "model", tmp_path / "notes"
    file = write_checkpoint(model, "llama").path / "model.safetensors"
    save_file(load_file(file) | {"extra": torch.zeros(1)}, file)
    config = load_config(model)
    first = note_unused(str(model), config, AnswerStore(notes))
    assert first == unused.note_unused(model, config) == f"{model}: 1 tensor not used: extra"
    command = [sys.executable, "-c", SECOND, str(model), str(notes)]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.stdout == f"{first} False\n", second.stderr


def test_weights_that_changed_are_looked_at_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those of another config, or of other code; and what is refused is refused again."""
    model, notes = tmp_path / "model", tmp_path / "notes"
    file = write_checkpoint(model, "llama").path / "model.safetensors"
    config, right = load_config(model), load_file(file)

    def ask(fresh: bool = False) -> int:
        store = AnswerStore(notes, fresh=fresh)
        note_unused(str(model), config, store)
        return store.num_computed

    assert [ask(), ask(), ask(fresh=True), ask()] == [1, 0, 1, 0]
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({n: t for n, t in right.items() if n != name}, file)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="is missing"):
            ask()
    save_file(right | {name: right[name][1:].contiguous()}, file)
    with pytest.raises(CheckpointError, match="has shape"):
        ask()
    save_file(right | {name: right[name].bfloat16()}, file)
    assert ask() == 1
    save_file(right, file)
    assert ask() == 0
    monkeypatch.setattr("rayk.experiments.unused._ANSWERING", ("types",))
    assert ask() == 1
