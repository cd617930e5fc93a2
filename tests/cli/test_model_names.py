"""Wherever a checkpoint's folder is taken, a model's name on the hub is: every parameter is accounted for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml
from typer.testing import CliRunner

from rayk import LLM, Experiment
from rayk.cli.main import app
from rayk.specs.experiment import dotted_keys
from rayk.types.errors import CheckpointError

NAME = "tiny-org/not-in-the-cache"
WORDS = ("model", "checkpoint", "tokenizer")
COMMANDS = {
    ("serve", "model"): ["serve", NAME],
    ("explain", "model"): ["explain", "--model", NAME],
    ("doctor", "model"): ["doctor", "--model", NAME],
    ("costs", "model"): ["costs", NAME, "--out", "costs"],
    ("plan", "spec"): ["plan", "plan.yaml"],
    ("run", "spec"): ["run", "spec.yaml"],
    ("checkpoint", "model"): ["checkpoint", "eagle3", "head", "--for", NAME],
    ("run", "overrides"): ["run", "other.yaml", "--set", f"model={NAME}"],
}
"""Parameters by which a checkpoint is named, and a command that names one."""
NO_CHECKPOINTS = {
    "a file or a folder of tables that is read": "bench.trace bench.prompts bench.dataset_path "
    "checkpoint.from_gguf "
    "conformance.python serve.dtype costs.wanted plan.costs plan.hardware",
    "a folder or file that is written": "run.out bench.out conformance.out report.out checkpoint.directory "
    "costs.out plan.out run.ray_token_file serve.ray_token_file",
    "a folder of a run": "report.directories costs.from_runs plan.validate",
    "how clients of a server name its model": "bench.model serve.served_model_name",
    "a number or a value": "checkpoint.family serve.max_model_len doctor.gpus doctor.tokens "
    "doctor.speculative checkpoint.overrides checkpoint.quantise serve.tool_call_parser",
}
PLAN = {
    "gpus": "1xH200",
    "hardware": "h200",
    "traffic": {"rate": 1, "input_tokens": 8, "output_tokens": 8},
    "slo": {"ttft": "1s"},
}
SPEC = {"prompts": {"random": {"count": 1, "input_tokens": [5]}}}


def parameters() -> Iterator[tuple[str, str]]:
    """Every parameter of every command that is a path, or speaks of a model."""
    for command in app.registered_commands:
        callback = command.callback
        assert callback is not None
        for name, parameter in inspect.signature(callback, eval_str=True).parameters.items():
            help_text = " ".join(str(getattr(m, "help", "")) for m in parameter.annotation.__metadata__)
            is_path = "Path" in str(parameter.annotation.__origin__)
            if is_path or any(word in f"{name} {help_text}".lower() for word in WORDS):
                yield command.name or callback.__name__, name


def test_every_parameter_is_accounted_for() -> None:
    """A new one belongs to COMMANDS, which tries it, or to NO_CHECKPOINTS."""
    others = {tuple(place.split(".")) for places in NO_CHECKPOINTS.values() for place in places.split()}
    assert set(parameters()) | {("run", "overrides")} == set(COMMANDS) | others


def test_every_key_of_a_spec_is_accounted_for() -> None:
    """`checkpoints` names folders that a run writes; `model` and its values in `matrix` are what it runs. A
    drafter's is a local folder: no engine has such drafters yet."""
    drafters = [f"{side}speculative.model" for side in ("prefill.", "decode.", "")]
    found = [key for key in dotted_keys() if any(word in key for word in WORDS)]
    assert found == ["model", "checkpoints", *drafters]


@pytest.fixture
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder and cache, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for file, model in (("spec.yaml", NAME), ("other.yaml", "checkpoints/other")):
        Path(file).write_text(yaml.safe_dump(SPEC | {"model": model}))
    Path("plan.yaml").write_text(yaml.safe_dump(PLAN | {"model": NAME}))


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=[".".join(place) for place in COMMANDS])
def test_commands_look_names_up(command: list[str]) -> None:
    """They say what is missing of a name, which of a folder they would not."""
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    assert (
        f"there is no folder {NAME} here; HF_HUB_OFFLINE is set, and it is not in the cache" in result.stderr
    )


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize(
    "look_up",
    [
        lambda: LLM(NAME),
        lambda: Experiment(SPEC | {"model": NAME}).run("run"),
        lambda: Experiment(SPEC | {"model": "checkpoints/other", "matrix": {"model": [NAME]}}).run("run"),
    ],
    ids=["LLM", "Experiment", "matrix"],
)
def test_python_looks_names_up(look_up: Callable[[], object]) -> None:
    with pytest.raises(CheckpointError, match=f"there is no folder {NAME} here; HF_HUB_OFFLINE is set"):
        look_up()
