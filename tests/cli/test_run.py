"""`rayk run`: every bad input of the contract with its message and exit code, before anything starts."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rayk.cli.main import app
from tests.conftest import CheckpointFactory
from tests.listeners import SETTINGS, listening
from tests.reports.synthetic import write_run
from tests.specs.models import spec


@pytest.fixture
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3")


def write_spec(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump(spec(**changes), sort_keys=False))
    return path


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    """The one message of a refused run: exit 2, nothing on stdout, no traceback, no Ray."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("rayk: ")
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engien": {}}, r"e\.yaml:\d+: unknown key 'engien'\n  mend: did you mean 'engine'"),
        ({"matrix": {"decode.tp": []}}, r"e\.yaml:\d+: axis decode\.tp is empty"),
        ({"matrix": {"decode.tp": ["two"]}}, r"decode\.tp must be a valid integer, got 'two'"),
        ({"matrix": {"prefill.tp": [1, 0]}}, r"e\.yaml:\d+: prefill\.tp must be greater than"),
        ({"prefill": {"layout": "NHD"}}, r"prefill\.layout must be one of 'auto', 'BHLNC'.*got 'NHD'"),
        ({"sampling": {"temperature": 0.7}}, "temperature must be 0, got 0.7"),
        ({"sampling": {"max_tokens": 5000}}, r"37 \+ max_tokens 5000 = 5037 tokens, over the model's 2048"),
        ({"engine": {"num_blocks": 3}}, r"need 4 KV blocks, over the prefill engine's pool of 2 \(3"),
        ({"device": "cuda"}, "device: cuda, but no GPU was found"),
        ({"transfer": {"mode": "shove"}}, "transfer.mode"),
        ({"prompts": {"file": "none.jsonl"}}, r"none\.jsonl: cannot read the prompts file"),
        ({"exclude": [{"mode": "disaggregated"}]}, "no cell is left"),
    ],
)
def test_bad_specs(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("rayk.specs.devices.count_local_gpus", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = write_spec(tmp_path, **{"model": str(model), **changes})
    assert re.search(message, refused(path, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_out_of_vocabulary_token(tmp_path: Path, model: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 1000000]}\n')
    path = write_spec(tmp_path, model=str(model), prompts={"file": str(prompts)})
    assert "p.jsonl:1: token id 1000000 is outside the vocabulary of" in refused(path)


def test_bad_checkpoints(tmp_path: Path, model: Path) -> None:
    path = write_spec(tmp_path, model=str(tmp_path / "none"))
    assert "none: no such checkpoint folder" in refused(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    path = write_spec(tmp_path, model=str(empty))
    assert "no config.json" in refused(path)
    (empty / "config.json").write_text("{")
    assert "config.json" in refused(path)
    (empty / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    message = refused(path)
    assert "architecture GPT2LMHeadModel is not supported" in message
    assert "Qwen3ForCausalLM" in message
    (empty / "config.json").write_text((model / "config.json").read_text())
    assert "no .safetensors weights" in refused(path)
    weights = (model / "model.safetensors").read_bytes()
    (empty / "model.safetensors").write_bytes(weights[:-1])
    message = "model.safetensors: not a readable safetensors file"
    assert f"{message}: {len(weights) - 1} of {len(weights)} bytes are there" in refused(path)
    (empty / "model.safetensors").write_text("no weights")
    assert message in refused(path)
    (empty / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert "the index names files that are not there: b.safetensors" in refused(path)


def test_missing_spec_bad_yaml_and_bad_set(tmp_path: Path, model: Path) -> None:
    assert "none.yaml: no such spec file" in refused(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2\n")
    assert "bad.yaml:2: not valid YAML" in refused(tmp_path / "bad.yaml")
    path = write_spec(tmp_path, model=str(model))
    assert "--set prefill.pt=2: unknown key 'prefill.pt'" in refused(path, "--set", "prefill.pt=2")


def test_existing_results_need_resume(tmp_path: Path, model: Path) -> None:
    write_run(tmp_path / "out")
    path = write_spec(tmp_path, model=str(model))
    assert "already holds a run's tables" in refused(path, "--out", tmp_path / "out")
    assert "the spec differs from the run's" in refused(path, "--out", tmp_path / "out", "--resume")
    assert "--resume needs --out" in refused(path, "--resume")


class _Driver:
    """Stands in for experiments.run: records the call, returns or raises what it is told."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, plan: Any, **options: Any) -> Any:
        self.calls.append((plan, options))
        options["progress"].plan(1, 0)
        options["progress"].begin("c")
        options["progress"].end("c", "PASS", "")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def stub_driver(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> _Driver:
    driver = _Driver(outcome)
    module = type(sys)("rayk.experiments.run")
    module.run_experiment = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rayk.experiments.run", module)
    return driver


def test_the_table_goes_to_stdout_and_the_rest_to_stderr(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayk.reports import load

    write_run(tmp_path / "good", failures=False)
    driver = stub_driver(monkeypatch, load(tmp_path / "good"))
    path = write_spec(tmp_path, model=str(model))
    with listening(SETTINGS) as address:
        result = run(path, "--out", tmp_path / "out", "--address", address, "--set", "decode.tp=2")
    assert result.exit_code == 0, result.stderr
    assert "18 of 18 PASS" in result.stdout
    assert "agg-tp4" in result.stdout
    assert "1/1 PASS" in result.stderr
    assert "report.html" in result.stderr
    ((plan, options),) = driver.calls
    assert [cell.decode.tp for cell, _ in plan.cells] == [2]
    assert plan.out == tmp_path / "out"
    assert (options["address"], plan.resume) == (address, False)


def test_an_address_where_nobody_listens(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    path = write_spec(tmp_path, model=str(model))
    message = f"no Ray cluster answers at '{address}'"
    assert message in refused(path, "--address", address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert message in refused(path)


def test_failed_cells_exit_1(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayk.reports import load

    write_run(tmp_path / "bad")
    stub_driver(monkeypatch, load(tmp_path / "bad"))
    result = run(write_spec(tmp_path, model=str(model)), "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "15 of 18 PASS" in result.stdout


def test_ctrl_c_exits_130(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_driver(monkeypatch, KeyboardInterrupt())
    result = run(write_spec(tmp_path, model=str(model)), "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert f"--out {tmp_path / 'out'} --resume continues" in result.stderr


def test_errors_of_the_program_keep_their_traceback(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_driver(monkeypatch, ZeroDivisionError("a bug"))
    result = run(write_spec(tmp_path, model=str(model)), "--out", tmp_path / "out")
    assert isinstance(result.exception, ZeroDivisionError)
