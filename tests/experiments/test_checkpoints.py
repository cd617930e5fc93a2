"""The `checkpoints:` of a spec: which are written, and when a run refuses to go by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from rayk.experiments.checkpoints import write_checkpoints
from rayk.experiments.planning import plan_experiment
from rayk.models.families import load_config
from rayk.models.families.eagle3 import read_eagle3
from rayk.specs import LoadedSpec, dump_spec, load_spec
from rayk.types.errors import SpecError, UserError
from tests.spec_models import JOBS
from tests.specs.models import spec


def loaded(tmp_path: Path, checkpoints: Any, **changes: Any) -> LoadedSpec:
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump(spec(**changes) | {"checkpoints": checkpoints}, sort_keys=False))
    return load_spec(path)


def test_missing_ones_that_cells_run_are_written_and_changed_ones_refused(tmp_path: Path) -> None:
    model, idle = tmp_path / "model", tmp_path / "idle"
    named = {str(model): {"family": "qwen3", "config": {"num_hidden_layers": 2}}, str(idle): "llama"}
    asked = loaded(tmp_path, named, model=str(model))
    told: list[str] = []
    write_checkpoints(asked, told.append)
    assert told == [f"writing a tiny checkpoint of qwen3 to {model}"]
    assert load_config(model).num_layers == 2
    assert not idle.exists()
    write_checkpoints(asked, told.append)
    assert len(told) == 1, "what is there is kept"

    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    line = (tmp_path / "e.yaml").read_text().splitlines().index(f"  {model}:") + 1
    with pytest.raises(UserError, match="was changed after it was written: config.json") as refused:
        write_checkpoints(asked, told.append)
    assert refused.value.where == f"{tmp_path / 'e.yaml'}:{line}: {model}"
    (model / "rayk_checkpoint.json").unlink()
    with pytest.raises(UserError):
        write_checkpoints(asked, told.append)
    assert (model / "config.json").exists(), "a model that rayk did not write is left alone"
    assert len(told) == 1


def heads(tmp_path: Path, **of_head: Any) -> dict[str, Any]:
    model, head = tmp_path / "model", tmp_path / "head"
    llama = {"family": "llama", "config": {"num_hidden_layers": 6}}
    return {str(head): {"family": "eagle3", **of_head}, str(model): llama}


def test_a_head_is_written_for_the_model_that_it_drafts_for(tmp_path: Path) -> None:
    """After that, and where some cell drafts with it."""
    model, head = tmp_path / "model", tmp_path / "head"
    drafts = {"method": "eagle3", "model": str(head)}
    named = heads(tmp_path, seed=2, config={"draft_vocab_size": 100})
    told: list[str] = []
    write_checkpoints(loaded(tmp_path, named, model=str(model)), told.append)
    assert not head.exists(), "nobody drafts"
    asked = loaded(tmp_path, named, model=str(model), matrix={"decode.speculative.model": [str(head)]})
    write_checkpoints(asked, told.append)
    assert told == [
        f"writing a tiny checkpoint of llama to {model}",
        f"writing a tiny eagle3 head for {model} to {head}",
    ]
    found = read_eagle3(head)
    assert (found.draft_vocab_size, found.decoder.hidden_size) == (100, load_config(model).hidden_size)
    write_checkpoints(loaded(tmp_path, named, model=str(model), speculative=drafts), told.append)
    assert len(told) == 2, "what is there is kept"


def test_a_head_of_several_models_says_for_which(tmp_path: Path) -> None:
    model, head, other = tmp_path / "model", tmp_path / "head", tmp_path / "other"
    drafts = {"method": "eagle3", "model": str(head)}
    changes = {"model": str(model), "speculative": drafts, "matrix": {"model": [str(model), str(other)]}}
    qwen = {str(other): "qwen3"}
    with pytest.raises(UserError, match="for one model, and the spec has 2") as refused:
        write_checkpoints(loaded(tmp_path, heads(tmp_path) | qwen, **changes), lambda _: None)
    assert refused.value.where.startswith(str(tmp_path / "e.yaml"))
    write_checkpoints(loaded(tmp_path, heads(tmp_path, model=str(model)) | qwen, **changes), lambda _: None)
    assert read_eagle3(head).decoder.vocab_size == load_config(model).vocab_size
    for given, message in (
        ({"family": "qwen3", "model": "m"}, "drafts for no model"),
        ({"family": "eagle3", "quantise": "fp8"}, "is stored in float32"),
    ):
        with pytest.raises(SpecError, match=message):
            loaded(tmp_path, {"m": given})


def test_a_changed_head_is_another_input(tmp_path: Path) -> None:
    """So that a run that it changes under is not resumed."""
    model, head, out = tmp_path / "model", tmp_path / "head", tmp_path / "out"
    drafts = {"method": "eagle3", "model": str(head)}
    prompts = {"random": {"count": 1, "input_tokens": [5]}}
    changes = {"model": str(model), "speculative": drafts, "prompts": prompts}
    asked = loaded(tmp_path, heads(tmp_path), **changes)
    plan = plan_experiment(asked, out, tell=lambda _: None)
    assert set(plan.inputs) == {str(model), str(head)}
    assert plan_experiment(asked, out, resume=True, tell=lambda _: None).inputs == plan.inputs
    weights = load_file(head / "model.safetensors")
    save_file(weights | {"norm.weight": weights["norm.weight"] + 1}, head / "model.safetensors")
    (head / "rayk_checkpoint.json").unlink()
    again = loaded(tmp_path, {str(model): heads(tmp_path)[str(model)]}, **changes)
    changed = plan_experiment(again, out, resume=True, tell=lambda _: None).inputs
    assert {name for name in changed if changed[name] != plan.inputs[name]} == {str(head)}


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        (
            {"m": "qwen4"},
            r"e\.yaml:\d+: checkpoints\.m\.family must be one of .* got 'qwen4'\n  mend: .*'qwen3'",
        ),
        (
            {"m": {"family": "qwen3", "sed": 1}},
            r"e\.yaml:\d+: unknown key 'sed' in 'checkpoints\.m'\n.*'seed'",
        ),
        ({"m": {"config": {}}}, r"checkpoints\.m\.family is missing"),
        ({"m": {"family": "qwen3", "seed": -1}}, r"checkpoints\.m\.seed must be greater than or equal to 0"),
        ({"m": {"family": "qwen3", "dtype": "auto"}}, r"checkpoints\.m\.dtype must be one of"),
        ({"": "qwen3"}, "checkpoints"),
        (["qwen3"], r"checkpoints must be a valid dictionary"),
        ({f"m{i}": "qwen3" for i in range(1001)}, "checkpoints must .* at most 1000 items"),
    ],
)
def test_bad_ones_are_named_with_their_line(tmp_path: Path, checkpoints: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(tmp_path, checkpoints)


def test_values_no_model_can_have_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    asked = loaded(tmp_path, {"m": {"family": "qwen3", "config": {"vocab_size": 12}}}, model="m")
    with pytest.raises(UserError, match=r"e\.yaml:\d+: vocab_size 12 cannot hold 256 bytes"):
        write_checkpoints(asked, pytest.fail)


def test_they_are_no_axis_and_are_kept_with_the_results(tmp_path: Path) -> None:
    asked = loaded(tmp_path, {"m": {"family": "mamba2", "config": {"n_groups": 1}}})
    assert load_spec(yaml.safe_load(dump_spec(asked.spec))).spec == asked.spec
    with pytest.raises(SpecError, match="checkpoints cannot be an axis"):
        loaded(tmp_path, {}, matrix={"checkpoints": [{}]})


def test_each_spec_of_jobs_names_every_model_it_runs() -> None:
    others = {"plan.yaml", "transfer_sweep.yaml"}  # no experiments
    specs = {p.name: load_spec(p).spec for p in sorted(JOBS.glob("*.yaml")) if p.name not in others}
    assert {"hetero_tp.yaml", "hybrid.yaml", "groups.yaml", "chaos.yaml"} <= specs.keys()
    for name, found in specs.items():
        made = ["checkpoints/smollm2-135m"] if name.startswith("real") else []  # by `make real`
        assert sorted(found.models()) == sorted([*found.checkpoints, *made]), name
