"""The commands that make a run again: for any machine, with the checkpoints it needs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayk.cli.checkpoint import parse_overrides
from rayk.cli.main import app
from rayk.oracle.checkpoint import write_checkpoint
from rayk.oracle.remake import changed_checkpoints, checkpoint_command, checkpoint_commands
from rayk.oracle.tiny import FAMILIES, family_values
from rayk.reports import Result
from rayk.reports.rerun import bench_commands, run_commands, run_needs
from tests.conftest import CheckpointFactory

COMMIT = "c" * 40


def result(spec: str, **environment: Any) -> Result:
    import pandas as pd

    nothing = pd.DataFrame()
    return Result(cells=nothing, requests=nothing, transfers=nothing, spec_yaml=spec, environment=environment)


def test_a_run_is_a_commit_its_checkpoints_and_its_spec() -> None:
    made = {"checkpoints/a": ["rayk", "checkpoint", "qwen3", "checkpoints/a", "--set", "vocab_size=300"]}
    of = result(
        "name: n\nmodel: checkpoints/a\n", git_commit=COMMIT, checkpoints=made, inputs={"checkpoints/a": "1"}
    )
    assert run_commands(of).splitlines() == [
        f"git checkout {COMMIT}",
        "rayk checkpoint qwen3 checkpoints/a --set vocab_size=300",
        "rayk run spec.yaml --out runs/n-again",
    ]
    assert "no command here makes" not in run_needs(of)
    assert "changes that no commit has" not in run_needs(of)


def test_folders_of_this_machine_become_folders_of_any() -> None:
    made = {"/tmp/x/my model": ["rayk", "checkpoint", "llama", "/tmp/x/my model"]}
    of = result("name: n\nmodel: /tmp/x/my model\n", git_commit=f"{COMMIT}+changes", checkpoints=made)
    text = run_commands(of)
    assert "/tmp" not in text
    assert [shlex.split(line) for line in text.splitlines()[1:]] == [
        ["rayk", "checkpoint", "llama", "checkpoints/my model"],
        ["rayk", "run", "spec.yaml", "--out", "runs/n-again", "--set", "model=checkpoints/my model"],
    ]
    assert text.startswith(f"git checkout {COMMIT}\n")
    assert "changes that no commit has" in run_needs(of)


def test_what_no_command_makes_is_named() -> None:
    of = result("name: n\nmodel: Qwen3-0.6B\n", inputs={"Qwen3-0.6B": "1", "prompts.jsonl": "2"})
    assert run_commands(of) == "rayk run spec.yaml --out runs/n-again"
    assert "Qwen3-0.6B, prompts.jsonl" in run_needs(of)
    assert run_commands(result("name: m\n")) == "rayk run spec.yaml --out runs/m-again"
    assert run_commands(result("")) == "", "nothing says what it ran"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            ["/x/.venv/bin/rayk", "bench", "--url", "http://h:1", "--out", "/tmp/o"],
            "rayk bench --url http://h:1",
        ),
        (["rayk", "bench", "--out=/tmp/o", "--slo", "ttft=1s"], "rayk bench --slo ttft=1s"),
        (["/x/jobs/serve_bench.py", "--resume", "--rate", "2"], "python jobs/serve_bench.py --rate 2"),
        ([], ""),
    ],
)
def test_a_benchs_command_is_without_its_folder(command: list[str], told: str) -> None:
    assert bench_commands({"command": command}) == told
    if command:
        assert bench_commands({"command": command, "git_commit": COMMIT}).startswith(
            f"git checkout {COMMIT}\n"
        )


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("gemma3", {"overrides": {"num_hidden_layers": 3, "rms_norm_eps": 1e-05}, "seed": 3}),
        ("llama", {"max_shard_size": "100KB", "dtype": "bfloat16", "tie": True}),
    ],
)
def test_a_checkpoints_command_writes_that_checkpoint(
    checkpoint: CheckpointFactory, family: str, options: dict[str, Any]
) -> None:
    """rayk checkpoint leaves a folder alone that holds what the command gives, and replaces any other."""
    folder = checkpoint(family, **options)
    files = {path: path.stat().st_ino for path in folder.iterdir()}
    command = checkpoint_command(str(folder))
    assert command[:4] == ["rayk", "checkpoint", family, str(folder)]
    done = CliRunner().invoke(app, command[1:])
    assert done.exit_code == 0, done.output
    assert {path: path.stat().st_ino for path in folder.iterdir()} == files
    words = shlex.split(shlex.join(command))
    overrides = parse_overrides([words[i + 1] for i, word in enumerate(words) if word == "--set"])
    assert family_values(family, overrides) == dict(FAMILIES[family]) | dict(options.get("overrides", {})) | (
        {"tie_word_embeddings": True} if "tie" in options else {}
    )


def test_a_checkpoint_that_was_changed_has_no_command(tmp_path: Path) -> None:
    """The command would write other weights than the run's."""
    folder = str(write_checkpoint("qwen3", tmp_path / "model", overrides={"num_hidden_layers": 1}))
    assert changed_checkpoints([folder]) == {}
    assert checkpoint_commands([folder])
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    changed = changed_checkpoints([folder])
    assert changed == {folder: ["model.safetensors"]}
    assert checkpoint_commands([folder]) == {}
    of = result(
        f"name: n\nmodel: {folder}\n", inputs={folder: "1"}, checkpoints={}, changed_checkpoints=changed
    )
    assert f"no command here makes: {folder}" in run_needs(of)
    assert "as `rayk checkpoint` had written it: model.safetensors had been changed" in run_needs(of)


def test_models_of_a_matrix_are_written_where_they_lay() -> None:
    """spec.yaml names them there, and no --set gives them another place."""
    made = {f"/a/{name}": ["rayk", "checkpoint", "llama", f"/a/{name}"] for name in ("m", "n")}
    of = result("name: n\nmatrix: {model: [/a/m, /a/n]}\n", checkpoints=made)
    assert run_commands(of).splitlines() == [
        "rayk checkpoint llama /a/m",
        "rayk checkpoint llama /a/n",
        "rayk run spec.yaml --out runs/n-again",
    ]


def test_folders_that_it_did_not_write_have_no_command(tmp_path: Path) -> None:
    (tmp_path / "rayk_checkpoint.json").write_text('{"parameters": {"family": "unheard of"}}')
    assert checkpoint_command(str(tmp_path)) == []
    for config in ("[]", '{"a": ' * 9 + "1" + "}" * 9):
        (tmp_path / "rayk_checkpoint.json").write_text(
            f'{{"parameters": {{"family": "qwen3", "config": {config}, "seed": "rm -rf"}}}}'
        )
        assert checkpoint_command(str(tmp_path)) == [], "not as rayk writes it"
    assert checkpoint_commands(["Qwen3-0.6B", str(tmp_path), os.devnull]) == {}
